"""Tell where a node comes from: the user's own line, and the calls of modules around it.

Contract
--------
- The user's line is that of the innermost frame outside of torch, graphpp and Python's standard library.
- A call is the module's FQN, such as `layers.0.attn`; `shared@2` is the third call of `shared`. This file alone knows torch's
  `nn_module_stack`.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx

MODEL = "model"  # the attribute of capture's wrapper that holds the user's model
_STACK = "nn_module_stack"
_OURS = tuple(os.path.join(folder, "") for folder in (Path(torch.__file__).parent, Path(__file__).absolute().parents[1]))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(stack_trace: str) -> str:
    """`file:line` of the innermost frame of the user's own code in a stack trace given as text; empty if there is none."""
    frames = [match for match in _FRAME.finditer(stack_trace) if is_user_file(match["file"])]
    return f"{frames[-1]['file']}:{frames[-1]['line']}" if frames else ""


def user_frame(stack: traceback.StackSummary) -> str:
    """`file:line in function: text` of the innermost frame of the user's own code; empty if there is none."""
    for frame in reversed(stack):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def calling_line() -> str:
    """The innermost frame of the user's own code that is running, in the form of a stack trace; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'


@cache
def is_user_file(path: str) -> bool:
    """True for a file outside of torch, graphpp and the standard library; other installed packages are the user's."""
    of_python = path.startswith(_PYTHON) and not path.startswith(_INSTALLED)
    return not of_python and not path.startswith(_OURS) and not path.startswith("<")


def module_calls(node: fx.Node) -> tuple[str, ...]:
    """The module calls that enclose a node, outermost first."""
    stack = node.meta.get(_STACK) or node.meta.get("fwd_nn_module_stack") or {}
    found = ((key, _name(key, fqn)) for key, (fqn, _) in stack.items())
    return tuple(name for _, name in found if name)


def around_all(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """The metadata of an operation that lies within all calls that are around every one of these nodes."""
    stacks = [list((node.meta.get(_STACK) or {}).items()) for node in nodes if node.op.startswith("call_")]
    common = stacks[0] if stacks else []
    for stack in stacks:
        same = [mine == theirs for mine, theirs in zip(common, stack, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    return {_STACK: dict(common)}


def _name(key: str, fqn: str) -> str:
    """The name of a call of a module of the model; empty for a call of the wrapper."""
    path, repeat = fqn.partition("@")[0], key.rpartition("@")[2] if "@" in key else ""
    return path.removeprefix(MODEL + ".") + (f"@{repeat}" if repeat else "") if path.startswith(MODEL + ".") else ""
