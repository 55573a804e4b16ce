"""Calls on fake tensors whose growing dimensions are twice as large: operands, results, and keys of equal calls.

Contract: a growth is a tuple with the power of the factor for each dimension of a tensor, or a tuple of such tuples for a tuple
of tensors. `twice` makes an operand, `powers_of` reads the growth of a result, `keyed` tells equal calls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import log2
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import hint
from graphpp.runtime.randomness import seeded

Dims = tuple[int, ...]
Exponents = Any  # Dims of a tensor, or a tuple of them


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which torch logs no error of a call on fake tensors: calls that fail are asked for here."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a node runs, and its arguments; those of a random operator follow its key."""
    return (node.args[2], node.args[3:]) if node.target is seeded else (node.target, node.args)


def name_of(node: fx.Node) -> str:
    """The name of an operator, of any overload; "" of a function."""
    return str(getattr(getattr(called(node)[0], "overloadpacket", None), "__name__", ""))


def shape_of(value: torch.Tensor) -> tuple[int, ...]:
    """The sizes of a tensor as plain numbers."""
    return tuple(map(hint, value.shape))


def has_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor, or a tuple that may contain some."""
    return isinstance(node.meta.get("val"), torch.Tensor | tuple | list)


def nothing_of(node: fx.Node) -> Exponents:
    """The growth of a value that does not grow."""
    return _zeros(node.meta.get("val"))


def _zeros(value: Any) -> Exponents:
    if isinstance(value, torch.Tensor):
        return (0,) * value.dim()
    return tuple(map(_zeros, value)) if isinstance(value, tuple | list) else ()


def grows(growth: Exponents) -> bool:
    """Whether any dimension grows."""
    return any(grows(each) if isinstance(each, tuple) else each for each in growth or ())


def sizes_of(value: Any, growth: Exponents) -> Iterator[tuple[int, int]]:
    """(size, power) of all dimensions of a tensor, or of a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        yield from zip(shape_of(value), growth, strict=True)
    elif isinstance(value, tuple | list):
        for each, own in zip(value, growth, strict=True):
            yield from sizes_of(each, own)


def twice(value: Any, growth: Exponents) -> Any:
    """A fake tensor whose growing dimensions are twice as large, with its strides in the same order."""
    if isinstance(value, tuple | list):
        return type(value)(twice(each, own) for each, own in zip(value, growth, strict=True))
    if not isinstance(value, torch.Tensor):
        return value
    shape = [hint(size) << power for size, power in zip(value.shape, growth, strict=True)]
    strides, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda at: (hint(value.stride(at)), -at)):
        strides[at], step = step, step * max(shape[at], 1)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def powers_of(value: Any, large: Any) -> Exponents:
    """The growth of a value, from the same value computed of operands that are twice as large."""
    if isinstance(value, torch.Tensor):
        pairs = zip(map(hint, value.shape), map(hint, large.shape), strict=True)
        return tuple(round(log_of(more / size)) if size else 0 for size, more in pairs)
    return tuple(map(powers_of, value, large)) if isinstance(value, tuple | list) else ()


def log_of(ratio: float) -> float:
    """The power of 2 that a ratio is; 0 for none."""
    return log2(ratio) if ratio > 0 else 0.0


def keyed(argument: Any, grown: Mapping[fx.Node, Exponents]) -> Any:
    """The facts of an argument on which the growth of a call depends, to be hashed."""
    if isinstance(argument, fx.Node):
        return facts_of_value(argument.meta.get("val")), grown[argument]
    if isinstance(argument, tuple | list):
        return tuple(keyed(each, grown) for each in argument)
    return argument if argument.__hash__ is not None else repr(argument)


def facts_of_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return shape_of(value), tuple(map(hint, value.stride())), value.dtype
    return tuple(map(facts_of_value, value)) if isinstance(value, tuple | list) else hint(value)
