"""Describe the arguments of a call of a repeated module, so that calls of one kind can be told.

Contract: an operator can stand for a call only if the arguments are tensors, plain data and tuples of these, and if no code can
tell the tensors from copies behind an operator. Calls with equal keys differ in nothing but the member and values of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from graphpp._torch import aot
from graphpp.capture.repeats.equal_modules import RepeatedModules
from graphpp.capture.repeats.operator_record import PLAIN
from graphpp.capture.repeats.stand_ins import Layout, gets_gradient
from graphpp.capture.transfer.process_state import process_state


def leaves_of(value: Any) -> list[Any] | None:
    """The tensors and plain data in arguments; None if there is anything else, such as a list, which the call may write."""
    args, kwargs = value
    found: list[Any] = []
    pending = [*reversed(list(kwargs.values())), *reversed(args)]
    while pending:
        each = pending.pop()
        if type(each) is tuple:
            found.append(len(each))
            pending += reversed(each)
        elif type(each) in PLAIN or (isinstance(each, torch.Tensor) and can_be_marked(each)):
            found.append(each)
        else:
            return None
    return found


def can_be_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor behind an operator is the same to all code; a parameter is none there, and attributes are lost."""
    foreign = vars(tensor).keys() - vars(Layout.of(tensor).empty()).keys()
    leaf, mathematical = tensor.is_leaf and gets_gradient(tensor), tensor.is_conj() or tensor.is_neg()
    return not (foreign or leaf or mathematical or tensor.storage_offset())


def key_of(group: RepeatedModules, leaves: Sequence[Any], kwargs: Any) -> Any:
    """Equal for calls of one kind."""
    first: dict[int, int] = {}
    described = [
        (type(leaf), Layout.of(leaf), first.setdefault(id(leaf), at))
        if isinstance(leaf, torch.Tensor)
        else (type(leaf), repr(leaf))
        for at, leaf in enumerate(leaves)
    ]
    return id(group), tuple(described), tuple(kwargs), repr(process_state()), aot.mode_depths()


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The value with other tensors, in order."""
    if type(value) is tuple:
        return tuple(with_tensors(each, tensors) for each in value)
    return next(tensors) if isinstance(value, torch.Tensor) else value
