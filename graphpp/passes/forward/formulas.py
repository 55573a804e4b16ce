"""Formulas for the elements of tensors that depend on positions alone, and their algebra.

With l = the sum of `along[d] * index[d]` over the dimensions d, an element is l + start (`Line`: indices, their sums and
differences), or `values[n]` with n the number of `cuts` that are at most l (`Steps`: comparisons of lines, logic and selection
over comparisons). A constant is `Steps` without cuts. A size that is symbolic stands for every size: a formula holds for all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

Number = int | float | bool
_SMALL = 16  # each of _FLOATS represents the integers up to this one
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # the others lack infinity
_STEEPEST, _FARTHEST = 2**8, 2**29  # of a line; int32 then holds its elements at positions below 2**20


@dataclass(frozen=True)
class Line:
    """The element at `index` is the sum of `along[d] * index[d]`, plus `start`; all are integers."""

    along: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class Steps:
    """The element at `index` is one of `values`: the n-th, if n of the ascending `cuts` are at most sum(along * index)."""

    along: tuple[int, ...]
    cuts: tuple[int, ...]
    values: tuple[Number, ...]


Formula = Line | Steps


def simplified(formula: Formula, sizes: Sequence[float]) -> Formula:
    """The same elements in one form, for tensors of at most these sizes, each 1 or more.

    `along` is 0 in dimensions of size 1; that of steps has no common factor, and its first number is positive. Some element
    reaches each cut, and the values on its two sides differ.
    """
    along = tuple(0 if size == 1 else each for each, size in zip(formula.along, sizes, strict=True))
    if isinstance(formula, Line):
        return replace(formula, along=along) if any(along) else Steps(along, (), (formula.start,))
    cuts, values = formula.cuts, formula.values
    if next((each for each in along if each), 0) < 0:
        along, cuts, values = tuple(-each for each in along), tuple(1 - cut for cut in reversed(cuts)), values[::-1]
    factor = math.gcd(*along) or 1
    along = tuple(each // factor for each in along)
    low = sum(each * (size - 1) for each, size in zip(along, sizes, strict=True) if each < 0)
    high = sum(each * (size - 1) for each, size in zip(along, sizes, strict=True) if each > 0)
    begin = {-math.inf: values[0]} | {-(-cut // factor): value for cut, value in zip(cuts, values[1:], strict=True)}
    first = max(cut for cut in begin if cut <= low)
    kept = [(cut, value) for cut, value in begin.items() if first <= cut <= high]
    steps = [each for at, each in enumerate(kept) if at == 0 or each[1] != kept[at - 1][1]]
    return Steps(along if steps[1:] else (0,) * len(along), tuple(int(cut) for cut, _ in steps[1:]), tuple(v for _, v in steps))


def converted(formula: Formula, dtype: torch.dtype) -> Formula | None:
    """The formula with values of a dtype; None if the dtype may change one of them, or for lines of other than integers."""
    if isinstance(formula, Line):
        near = all(abs(each) <= _STEEPEST for each in formula.along) and abs(formula.start) <= _FARTHEST
        return formula if near and dtype in (torch.int32, torch.int64) else None
    if dtype is torch.bool:
        return replace(formula, values=tuple(map(bool, formula.values)))
    if dtype in _FLOATS:
        exact = (-math.inf, math.inf, torch.finfo(dtype).min, torch.finfo(dtype).max)
        fits = all(each in exact or (abs(each) <= _SMALL and each == int(each)) for each in formula.values)
        return replace(formula, values=tuple(map(float, formula.values))) if fits else None
    if dtype.is_floating_point or dtype.is_complex or any(isinstance(each, float) for each in formula.values):
        return None
    fits = all(torch.iinfo(dtype).min <= each <= torch.iinfo(dtype).max for each in formula.values)
    return replace(formula, values=tuple(map(int, formula.values))) if fits else None


def moved_by(formula: Formula, along: Sequence[int], distance: int) -> Formula:
    """The formula whose l is the sum of `along` times the indices, plus `distance`."""
    if isinstance(formula, Steps):
        return Steps(tuple(along), tuple(cut - distance for cut in formula.cuts), formula.values)
    return Line(tuple(along), formula.start + distance)


def as_line(formula: Formula) -> Line | None:
    """A line, or an integer constant as a line."""
    if isinstance(formula, Line):
        return formula
    return Line(formula.along, int(formula.values[0])) if not formula.cuts and type(formula.values[0]) is int else None


def combined(function: Callable[..., Number], known: Sequence[Formula]) -> Steps | None:
    """`function` of the elements at each index; None if one formula is a line, or if two vary along different directions."""
    steps = [each for each in known if isinstance(each, Steps)]
    directions = {each.along for each in steps if each.cuts}
    if len(steps) < len(known) or len(directions) > 1:
        return None
    cuts = sorted({cut for each in steps for cut in each.cuts})
    regions = [None, *cuts]  # the region before the first cut, and the regions that begin with a cut
    picked = [[each.values[0 if at is None else bisect_right(each.cuts, at)] for each in steps] for at in regions]
    along = directions.pop() if directions else steps[0].along
    return Steps(along, tuple(cuts), tuple(function(*values) for values in picked))


def sign(along: tuple[int, ...], start: int, function: Callable[[Any, Any], bool]) -> Steps:
    """The steps of `function(l + start, 0)`, which depends on the sign alone."""
    return Steps(along, (-start, 1 - start), tuple(function(each, 0) for each in (-1, 0, 1)))
