"""Objects whose state is not watched, such as a trainer: large, and changed in each step by code that computes no loss."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

from graphpp.errors import GraphPPError

T = TypeVar("T")
_UNWATCHED = weakref.WeakValueDictionary[int, Any]()  # by `id`, for an object may have no hash


def unwatched(value: T) -> T:
    """Let graphpp not look into an object that the code of a model or a loss reaches; returns the object.

    Without this graphpp walks through the object's attributes, and captures again when one changes that the code names. A
    change that alters the computation raises `CaptureError` at the next audit (`Debug.audit`). Raises `GraphPPError` for an
    object without weak references, such as a number, a list or a dict.
    """
    try:
        _UNWATCHED[id(value)] = value
    except TypeError as error:
        raise GraphPPError(
            f"unwatched: a {type(value).__name__} has no weak references: give the object that has it as an attribute"
        ) from error
    return value


def is_unwatched(value: Any) -> bool:
    return id(value) in _UNWATCHED
