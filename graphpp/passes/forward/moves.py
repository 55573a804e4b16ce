"""Formulas of operations that move elements: views, slices, selections, elements at given indices.

A rule takes one node as a `Call`, and returns the formula of its result, or None if the formula is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphpp.passes.forward.formulas import Formula, Steps, as_line, converted, moved_by

aten = torch.ops.aten


@dataclass(frozen=True)
class Call:
    """One node for its rule: the shape of its result, what its sizes may grow to, and the formulas of its arguments."""

    node: fx.Node
    shape: Sequence[Any]
    sizes: Sequence[float]
    found: dict[fx.Node, Formula]

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        return self.node.args[at] if at < len(self.node.args) else self.node.kwargs.get(name, default)

    def formula(self, value: Any) -> Formula | None:
        """The formula of an argument, a number included, broadcast to the dimensions of the result."""
        dims = len(self.shape)
        if isinstance(value, bool | int | float):
            return Steps((0,) * dims, (), (value,))
        known = self.found.get(value) if isinstance(value, fx.Node) else None
        return known and replace(known, along=(0,) * (dims - len(known.along)) + known.along)

    def formulas(self, count: int) -> list[Formula] | None:
        """The formulas of the first `count` arguments, broadcast to the result; None if one is unknown."""
        known = [self.formula(value) for value in self.node.args[:count]]
        return None if len(known) < count or None in known else [each for each in known if each is not None]

    def operands(self) -> list[Formula] | None:
        """The formulas of two arguments in their common dtype, in which torch computes; None if one is unknown."""
        known = self.formulas(2)
        if known is None:
            return None
        values: list[Any] = [each.meta["val"] if isinstance(each, fx.Node) else each for each in self.node.args[:2]]
        common = [converted(each, torch.result_type(*values)) for each in known]
        return None if None in common else [each for each in common if each is not None]


Rule = Callable[[Call], Formula | None]


def _with_dims(change: Callable[[Call, list[int]], list[int] | None]) -> Rule:
    """The rule of a view that `change` describes by its effect on `along`."""

    def rule(call: Call) -> Formula | None:
        source = call.argument(0, "self")
        known = call.found.get(source) if isinstance(source, fx.Node) else None
        if known is None or source.meta["val"].dtype != call.node.meta["val"].dtype:  # `view(dtype)` keeps the bits
            return None
        along = change(call, list(known.along))
        return None if along is None else replace(known, along=tuple(along))

    return rule


def _unsqueezed(call: Call, along: list[int]) -> list[int]:
    at = call.argument(1, "dim")
    along.insert(at + len(along) + 1 if at < 0 else at, 0)
    return along


def _expanded(call: Call, along: list[int]) -> list[int]:
    return [0] * (len(call.shape) - len(along)) + along


def _transposed(call: Call, along: list[int]) -> list[int]:
    one, other = call.argument(1, "dim0", -2), call.argument(2, "dim1", -1)
    if len(along) > 1:  # otherwise the operation does nothing
        along[one], along[other] = along[other], along[one]
    return along


def _permuted(call: Call, along: list[int]) -> list[int]:
    return [along[each] for each in call.argument(1, "dims")]


def _reshaped(call: Call, along: list[int]) -> list[int] | None:
    """Along a result whose dimensions differ from the source's only by dimensions of size 1."""
    source = call.node.args[0].meta["val"].shape  # type: ignore[union-attr]
    before = [(size, each) for size, each in zip(source, along, strict=True) if not is_one(size)]
    after = [size for size in call.shape if not is_one(size)]
    if len(before) != len(after) or not all(_equal(one, other) for (one, _), other in zip(before, after, strict=True)):
        return None
    kept = iter(each for _, each in before)
    return [0 if is_one(size) else next(kept) for size in call.shape]


def is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal, known without a guard."""
    return bool(one == other) if isinstance(one, int) and isinstance(other, int) else str(one) == str(other)


def _sliced(call: Call) -> Formula | None:
    """A slice moves the formula; a selection of one index is a slice without its dimension."""
    source = call.argument(0, "self")
    known = call.found.get(source) if isinstance(source, fx.Node) else None
    takes_one = call.node.target is aten.select.int
    at, begin = call.argument(1, "dim", 0), call.argument(2, "index" if takes_one else "start")
    step = 1 if takes_one else call.argument(4, "step", 1)
    if known is None or not isinstance(begin, int | None) or not isinstance(step, int) or (begin or 0) < 0:
        return None
    along, moved = list(known.along), known.along[at] * (begin or 0)
    along[at] *= step
    if takes_one:
        del along[at]
    return moved_by(known, along, moved)


def _indexed(call: Call) -> Formula | None:
    """Elements at the positions of index tensors: a formula of formulas, if each dimension has an index, each a line."""
    source, indices = call.node.args
    known = call.found.get(source) if isinstance(source, fx.Node) else None
    if known is None or not isinstance(indices, list | tuple) or len(indices) != len(known.along):
        return None
    if not all(isinstance(each, fx.Node) and each.meta["val"].dtype is not torch.bool for each in indices):
        return None
    lines = [None if formula is None else as_line(formula) for formula in map(call.formula, indices)]
    along, start = [0] * len(call.shape), 0
    for each, line in zip(known.along, lines, strict=True):
        if each and (line is None or line.start < 0 or min(line.along) < 0):  # a negative index counts from the end
            return None
        if each and line is not None:
            along = [one + each * other for one, other in zip(along, line.along, strict=True)]
            start += each * line.start
    return moved_by(known, along, start)


MOVES: dict[Any, Rule] = {
    aten.unsqueeze: _with_dims(_unsqueezed),
    **dict.fromkeys((aten.expand, aten.expand_as, aten.broadcast_to), _with_dims(_expanded)),
    **dict.fromkeys((aten.view, aten.reshape, aten.squeeze, aten._unsafe_view), _with_dims(_reshaped)),
    **dict.fromkeys((aten.transpose, aten.t, aten.mT), _with_dims(_transposed)),
    aten.permute: _with_dims(_permuted),
    **dict.fromkeys((aten.slice, aten.select), _sliced),
    aten.index: _indexed,
}
