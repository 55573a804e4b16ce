"""The user's source line of a node, and the module calls around it.

Contract
--------
- The user's line is the innermost frame outside of torch, graphpp and the standard library.
- A call is the module's FQN, such as `layers.0.attn`; `shared@2` is the third call of `shared`. No other file reads torch's
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

MODEL = "model"  # the user's model in capture's wrapper module
_STACK = "nn_module_stack"
_OURS = tuple(os.path.join(folder, "") for folder in (Path(torch.__file__).parent, Path(__file__).absolute().parents[1]))
_PYTHON = os.path.join(sysconfig.get_path("stdlib"), "")
_INSTALLED = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("purelib", "platlib"))
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def source_line(stack_trace: str) -> str:
    """`file:line` of the innermost user frame in a stack trace as text; empty if there is none."""
    frames = [f"{match['file']}:{match['line']}" for match in _FRAME.finditer(stack_trace) if is_user_file(match["file"])]
    return frames[-1] if frames else ""


def user_frame(stack: traceback.StackSummary) -> str:
    """`file:line in function: text` of the innermost user frame; empty if there is none."""
    for frame in reversed(stack):
        if is_user_file(frame.filename):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return ""


def user_line() -> str:
    """`user_frame` of the running code."""
    return user_frame(traceback.extract_stack())


def calling_line() -> str:
    """The innermost user frame of the running code as stack trace text; empty if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f'File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'


@cache
def is_user_file(path: str) -> bool:
    """Whether a file is outside of torch, graphpp and the standard library; other installed packages count as the user's."""
    of_python = path.startswith(_PYTHON) and not path.startswith(_INSTALLED)
    return not of_python and not path.startswith(_OURS) and not path.startswith("<")


def module_calls(node: fx.Node) -> tuple[str, ...]:
    """The module calls that enclose a node, outermost first."""
    stack = node.meta.get(_STACK) or node.meta.get("fwd_nn_module_stack") or {}
    found = ((key, _name(key, fqn)) for key, (fqn, _) in stack.items())
    return tuple(name for _, name in found if name)


def inside_call(node: fx.Node, name: str) -> dict[str, Any]:
    """The metadata of an operation inside a call `name` within the innermost module call of a node."""
    stack = dict(node.meta.get(_STACK) or {})
    key, (path, kind) = next(reversed(stack.items()), ("", (MODEL, "")))
    repeat = key.rpartition("@")[2] if "@" in key else ""
    stack[f"{key}.{name}" + (f"@{repeat}" if repeat else "")] = f"{path.partition('@')[0]}.{name}", kind
    kept = {each: value for each, value in node.meta.items() if each != "val"}
    return {**kept, _STACK: stack}


def around_all(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """The metadata of an operation inside all module calls that these nodes have in common."""
    stacks = [list((node.meta.get(_STACK) or {}).items()) for node in nodes if node.op.startswith("call_")]
    common = stacks[0] if stacks else []
    for stack in stacks:
        same = [mine == theirs for mine, theirs in zip(common, stack, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    return {_STACK: dict(common)}


def _name(key: str, fqn: str) -> str:
    """The name of a module call; empty for the wrapper."""
    path, repeat = fqn.partition("@")[0], key.rpartition("@")[2] if "@" in key else ""
    return path.removeprefix(MODEL + ".") + (f"@{repeat}" if repeat else "") if path.startswith(MODEL + ".") else ""
