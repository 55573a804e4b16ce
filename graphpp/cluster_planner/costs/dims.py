"""The powers with which the dimensions of a value grow, where other dimensions become twice as large.

Contract: `Dims` has a power for each dimension of a tensor; the powers of a tuple of tensors are a tuple of `Dims`. `twice`
makes the larger value, `powers_of` compares a value with the larger one.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log2
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import hint
from graphpp.runtime.random_keys import seeded

Dims = tuple[int, ...]
Powers = Any  # Dims of a tensor, or a tuple of them


def called(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operator that a node runs, and its arguments; those of a random operator follow its key."""
    return (node.args[2], node.args[3:]) if node.target is seeded else (node.target, node.args)


def name_of(node: fx.Node) -> str:
    """The name of an operator, of any overload; "" of a function."""
    return str(getattr(getattr(called(node)[0], "overloadpacket", None), "__name__", ""))


def shape_of(value: torch.Tensor) -> Dims:
    """The sizes of a tensor as plain numbers."""
    return tuple(map(hint, value.shape))


def unchanged(value: Any) -> Powers:
    """The powers of a value that does not grow."""
    if isinstance(value, torch.Tensor):
        return (0,) * value.dim()
    return tuple(map(unchanged, value)) if isinstance(value, tuple | list) else ()


def grows(powers: Powers) -> bool:
    """Whether any dimension grows."""
    return any(grows(each) if isinstance(each, tuple) else each for each in powers)


def growing_sizes(value: Any, powers: Powers) -> Iterator[int]:
    """The sizes of the growing dimensions of a tensor, or of a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        yield from (size for size, power in zip(shape_of(value), powers, strict=True) if power)
    elif isinstance(value, tuple | list):
        for each, own in zip(value, powers, strict=True):
            yield from growing_sizes(each, own)


def twice(value: Any, powers: Powers) -> Any:
    """A tensor whose growing dimensions are twice as large, with its strides in the same order."""
    if isinstance(value, tuple | list):
        return type(value)(twice(each, own) for each, own in zip(value, powers, strict=True))
    if not isinstance(value, torch.Tensor):
        return value
    shape = [hint(size) << power for size, power in zip(value.shape, powers, strict=True)]
    strides, step = [0] * len(shape), 1
    for at in sorted(range(len(shape)), key=lambda at: (hint(value.stride(at)), -at)):
        strides[at], step = step, step * max(shape[at], 1)
    return torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)


def powers_of(value: Any, larger: Any) -> Powers:
    """The powers of a value, from the same value where some dimensions are twice as large."""
    if isinstance(value, torch.Tensor):
        return tuple(map(power_of, shape_of(value), shape_of(larger)))
    return tuple(map(powers_of, value, larger)) if isinstance(value, tuple | list) else ()


def power_of(number: float, larger: float) -> int:
    """The power of 2 by which a number is larger, rounded; 0 without a number."""
    return round(log2(larger / number)) if number and larger else 0
