"""Values that are no entries of their own, as text that reading cannot make code of.

Contract: `as_text` takes dicts, lists, tuples, numbers, strings and tensors, and NumPy's numbers as Python's; equal values give
equal texts. `from_text` reads the text by `torch.load(weights_only=True)`. Both raise `CheckpointError` for other classes.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import torch

from graphpp.errors import CheckpointError


def as_text(name: str, value: Any) -> str:
    """A value as text; `name` is for the error."""
    written = io.BytesIO()
    try:
        torch.save(_plain(value), written)
    except Exception as fault:  # whatever the value's own pickling raises
        raise _refusal(name, fault) from fault
    text = base64.b64encode(written.getvalue()).decode()
    from_text(name, text)
    return text


def from_text(name: str, text: str) -> Any:
    """The value that `as_text` wrote; `name` is for the error."""
    try:
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
    except Exception as fault:
        raise _refusal(name, fault) from fault


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(each) for each in value)
    is_numpy_number = type(value).__module__ == "numpy" and hasattr(value, "item") and getattr(value, "ndim", 1) == 0
    return value.item() if is_numpy_number else value


def _refusal(name: str, fault: Exception) -> CheckpointError:
    return CheckpointError(
        f"{name} of the checkpoint is no plain data, and reading it would run code. Give dicts, lists, tuples, numbers, "
        f"strings and tensors, or an object whose state_dict() has these alone ({type(fault).__name__}: {torchs_reason(fault)})"
    )


def torchs_reason(fault: Exception) -> str:
    """The line of torch's message that names the class."""
    lines = [line.strip() for line in str(fault).splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else "")[:300]
