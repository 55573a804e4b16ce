"""Find the user's own line in a stack: the innermost frame outside of torch, graphpp and Python's standard library."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from pathlib import Path

import torch

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


def is_user_file(path: str) -> bool:
    """True for a file outside of torch, graphpp and the standard library; other installed packages are the user's."""
    of_python = path.startswith(_PYTHON) and not path.startswith(_INSTALLED)
    return not of_python and not path.startswith(_OURS) and not path.startswith("<")
