"""The powers with which a value's dimensions grow when other dimensions are doubled: `Dims`, or a tuple of `Dims`."""

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
    """The operator that a node runs, and its arguments without the key of a random operator."""
    return (node.args[2], node.args[3:]) if node.target is seeded else (node.target, node.args)


def name_of(node: fx.Node) -> str:
    """The operator's name without overload; "" for a plain function."""
    return str(getattr(getattr(called(node)[0], "overloadpacket", None), "__name__", ""))


def shape_of(value: torch.Tensor) -> Dims:
    return tuple(map(hint, value.shape))


def unchanged(value: Any) -> Powers:
    if isinstance(value, torch.Tensor):
        return (0,) * value.dim()
    return tuple(map(unchanged, value)) if isinstance(value, tuple | list) else ()


def grows(powers: Powers) -> bool:
    return any(grows(each) if isinstance(each, tuple) else each for each in powers)


def growing_sizes(value: Any, powers: Powers) -> Iterator[int]:
    """The sizes of the growing dimensions of a tensor, or of a tuple of tensors."""
    if isinstance(value, torch.Tensor):
        yield from (size for size, power in zip(shape_of(value), powers, strict=True) if power)
    elif isinstance(value, tuple | list):
        for each, own in zip(value, powers, strict=True):
            yield from growing_sizes(each, own)


def twice(value: Any, powers: Powers) -> Any:
    """A tensor with doubled growing dimensions; its strides keep their order."""
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
    """The powers of a value, from the same value with some dimensions doubled."""
    if isinstance(value, torch.Tensor):
        return tuple(map(power_of, shape_of(value), shape_of(larger)))
    return tuple(map(powers_of, value, larger)) if isinstance(value, tuple | list) else ()


def power_of(number: float, larger: float) -> int:
    """The rounded log2 of `larger / number`; 0 if either is 0."""
    return round(log2(larger / number)) if number and larger else 0
