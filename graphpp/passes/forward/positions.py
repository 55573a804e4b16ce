"""Find the tensors of a graph that depend on positions alone, such as masks, as formulas over the indices of their elements.

Contract
- `positions(graph)` maps nodes to a formula. A formula holds for every input of the graph and, where a size of the graph is
  symbolic, for every value of that size. A node without a formula is unknown: the analysis never guesses.
- Two kinds of formulas. With l = sum of along[d] * index[d], the element is l + start (`Line`: indices, their sums and
  differences), or it is `values[n]`, n the number of `cuts` that are at most l (`Steps`: comparisons of lines, and logic and
  selection over comparisons). A constant is `Steps` without cuts.
- An operation without a rule in `_RULES`, a combination of two directions `along`, and memory that an in-place operation
  writes have no formula.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Number = int | float | bool
_SMALL = 16  # every dtype represents the integers up to this one


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


def positions(graph: fx.Graph) -> dict[fx.Node, Formula]:
    """The formulas of the nodes that depend on positions alone. Nodes need their tensor in `meta["val"]`."""
    written, found = _written(graph), dict[fx.Node, Formula]()
    for node in graph.nodes:
        rule, value = _RULES.get(getattr(node.target, "overloadpacket", node.target)), node.meta.get("val")
        if rule is None or not isinstance(value, torch.Tensor) or node in written:
            continue
        formula = rule(_Call(node, value.shape, found))
        converted = formula and _converted(formula, value.dtype)
        if converted is not None:
            found[node] = _simplified(converted, value.shape)
    return found


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory an in-place operation of the graph writes."""
    root, written = dict[fx.Node, fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        shares = node.target is operator.getitem or (schema is not None and any(each.alias_info for each in schema.returns))
        root[node] = root[first] if first is not None and shares else node
        if schema is not None and schema.is_mutable and node.target is not aten.detach_.default:
            given = {**dict(zip((each.name for each in schema.arguments), node.args, strict=False)), **node.kwargs}
            writes = (given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write)
            written |= {root[value] for value in writes if isinstance(value, fx.Node)}
    return {node for node in graph.nodes if root[node] in written}


@dataclass(frozen=True)
class _Call:
    """One node for its rule: the shape of its result, and the formulas of its arguments."""

    node: fx.Node
    shape: Sequence[Any]
    found: dict[fx.Node, Formula]

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        return self.node.args[at] if at < len(self.node.args) else self.node.kwargs.get(name, default)

    def formula(self, value: Any, dims: int | None = None) -> Formula | None:
        """The formula of an argument, a number included, for a result of `dims` dimensions to which the argument broadcasts."""
        dims = len(self.shape) if dims is None else dims
        if isinstance(value, bool | int | float):
            return Steps((0,) * dims, (), (value,))
        known = self.found.get(value) if isinstance(value, fx.Node) else None
        return known and replace(known, along=(0,) * (dims - len(known.along)) + known.along)

    def formulas(self, count: int) -> list[Formula] | None:
        """The formulas of the first `count` arguments, broadcast to the result; None if one is unknown."""
        known = [self.formula(value) for value in self.node.args[:count]]
        return None if len(known) < count or None in known else [each for each in known if each is not None]


Rule = Callable[[_Call], Formula | None]


def _simplified(formula: Formula, shape: Sequence[Any]) -> Formula:
    """The same elements in one form: no part along a dimension of size 1, no cut that no element reaches, cuts that differ."""
    sizes = [size if isinstance(size, int) else math.inf for size in shape]  # a symbolic size may be as large as one likes
    along = tuple(0 if size == 1 else each for each, size in zip(formula.along, sizes, strict=True))
    if isinstance(formula, Line):
        return replace(formula, along=along) if any(along) else Steps(along, (), (formula.start,))
    low = sum(each * (size - 1) for each, size in zip(along, sizes, strict=True) if each < 0)
    high = sum(each * (size - 1) for each, size in zip(along, sizes, strict=True) if each > 0)
    cuts, values = list[int](), [formula.values[bisect_right(formula.cuts, low)]]
    for cut, value in zip(formula.cuts, formula.values[1:], strict=True):
        if low < cut <= high and value != values[-1]:
            cuts.append(cut)
            values.append(value)
    return Steps(along if cuts else (0,) * len(along), tuple(cuts), tuple(values))


def _converted(formula: Formula, dtype: torch.dtype) -> Formula | None:
    """The formula with values of a dtype; None if the dtype might round one of them, or for lines of other than integers."""
    if isinstance(formula, Line):
        return formula if dtype in (torch.int32, torch.int64) else None
    if dtype is torch.bool:
        return replace(formula, values=tuple(map(bool, formula.values)))
    exact = {math.inf, -math.inf, *((torch.finfo(dtype).min, torch.finfo(dtype).max) if dtype.is_floating_point else ())}
    if not dtype.is_floating_point and any(isinstance(each, float) for each in formula.values):
        return None
    whole = all(each in exact or (each == int(each) and abs(each) <= _SMALL) for each in formula.values)
    kind = float if dtype.is_floating_point else int
    return replace(formula, values=tuple(map(kind, formula.values))) if whole else None


def _steps(formula: Formula) -> Steps | None:
    return formula if isinstance(formula, Steps) else None


def _line(formula: Formula) -> Line | None:
    """A line, or an integer constant as a line."""
    if isinstance(formula, Line):
        return formula
    return Line(formula.along, int(formula.values[0])) if not formula.cuts and type(formula.values[0]) is int else None


def _pointwise(function: Callable[..., Number], count: int) -> Rule:
    """The rule of an operation on the values of `count` arguments, of which all that vary have one direction."""

    def rule(call: _Call) -> Formula | None:
        known = call.formulas(count)
        return None if known is None else _combined(function, known)

    return rule


def _combined(function: Callable[..., Number], known: Sequence[Formula]) -> Steps | None:
    parts = [_steps(each) for each in known]
    steps = [each for each in parts if each is not None]
    directions = {each.along for each in steps if each.cuts}
    if len(steps) < len(parts) or len(directions) > 1:
        return None
    cuts = sorted({cut for each in steps for cut in each.cuts})
    regions = [None, *cuts]  # the region before the first cut, and the regions that begin with a cut
    picked = [[each.values[0 if at is None else bisect_right(each.cuts, at)] for each in steps] for at in regions]
    along = directions.pop() if directions else steps[0].along
    return Steps(along, tuple(cuts), tuple(function(*values) for values in picked))


def _compared(function: Callable[[Any, Any], bool]) -> Rule:
    """The rule of a comparison of two lines, or of steps with a number."""

    def rule(call: _Call) -> Formula | None:
        known = call.formulas(2)
        if known is None:
            return None
        lines = [_line(each) for each in known]
        if None in lines or not any(isinstance(each, Line) for each in known):
            return _combined(function, known)
        one, other = (each for each in lines if each is not None)
        along = tuple(map(operator.sub, one.along, other.along))
        return _sign(along, one.start - other.start, function)

    return rule


def _sign(along: tuple[int, ...], start: int, function: Callable[[Any, Any], bool]) -> Steps:
    """The steps of `function(l + start, 0)`, with `along` divided by its common factor and its first number positive."""
    values = tuple(function(sign, 0) for sign in (-1, 0, 1))
    factor = math.gcd(*along)
    if not factor:
        return Steps(along, (), (function(start, 0),))
    if next(each for each in along if each) < 0:  # l + start = -(-l - start)
        along, start, values = tuple(-each for each in along), -start, values[::-1]
    cuts = -(start // factor), (-start) // factor + 1  # the first l / factor at which l + start >= 0, and > 0
    if cuts[0] == cuts[1]:
        return Steps(tuple(each // factor for each in along), cuts[:1], (values[0], values[2]))
    return Steps(tuple(each // factor for each in along), cuts, values)


def _sum(sign: int) -> Rule:
    """The rule of a sum or difference of lines, or of constants."""

    def rule(call: _Call) -> Formula | None:
        known = call.formulas(2)
        if known is None or call.argument(2, "alpha", 1) != 1:
            return None
        lines = [_line(each) for each in known]
        if None in lines:
            return _combined(lambda one, other: one + sign * other, known)
        one, other = (each for each in lines if each is not None)
        return Line(tuple(a + sign * b for a, b in zip(one.along, other.along, strict=True)), one.start + sign * other.start)

    return rule


def _product(call: _Call) -> Formula | None:
    known = call.formulas(2)
    if known is None:
        return None
    for one, other in (known, known[::-1]):
        factor = _line(other)
        if isinstance(one, Line) and factor is not None and not any(factor.along):
            return Line(tuple(each * factor.start for each in one.along), one.start * factor.start)
    return _combined(operator.mul, known)


def _selected(call: _Call) -> Formula | None:
    known = call.formulas(3)
    return None if known is None else _combined(lambda chosen, one, other: one if chosen else other, known)


def _filled(call: _Call) -> Formula | None:
    known = call.formulas(3)
    return None if known is None else _combined(lambda value, masked, other: other if masked else value, known)


def _arange(call: _Call) -> Formula | None:
    overload, arguments = call.node.target._overloadname, call.node.args  # type: ignore[union-attr]
    start, step = (0 if overload == "default" else arguments[0]), (arguments[2] if overload == "start_step" else 1)
    integer = isinstance(start, int) and isinstance(step, int) and not call.node.meta["val"].is_floating_point()
    return Line((step,), start) if integer else None  # type: ignore[arg-type]


def _constant(at: int, name: str, default: Number | None = None) -> Rule:
    """The rule of a tensor filled with its argument `at`, or with `default`."""

    def rule(call: _Call) -> Formula | None:
        return call.formula(call.argument(at, name) if default is None else default)

    return rule


def _same(call: _Call) -> Formula | None:
    return call.formula(call.argument(0, "self"))


def _with_dims(change: Callable[[_Call, list[int]], list[int] | None]) -> Rule:
    """The rule of a view that `change` describes by its effect on `along`."""

    def rule(call: _Call) -> Formula | None:
        source = call.argument(0, "self")
        known = call.found.get(source) if isinstance(source, fx.Node) else None
        along = None if known is None else change(call, list(known.along))
        return None if known is None or along is None else replace(known, along=tuple(along))

    return rule


def _unsqueezed(call: _Call, along: list[int]) -> list[int]:
    at = call.argument(1, "dim")
    along.insert(at + len(along) + 1 if at < 0 else at, 0)
    return along


def _expanded(call: _Call, along: list[int]) -> list[int]:
    return [0] * (len(call.shape) - len(along)) + along


def _transposed(call: _Call, along: list[int]) -> list[int]:
    one, other = call.argument(1, "dim0"), call.argument(2, "dim1")
    along[one], along[other] = along[other], along[one]
    return along


def _permuted(call: _Call, along: list[int]) -> list[int]:
    return [along[each] for each in call.argument(1, "dims")]


def _reshaped(call: _Call, along: list[int]) -> list[int] | None:
    """Along a result whose dimensions differ from the source's only by dimensions of size 1."""
    source = call.node.args[0].meta["val"].shape  # type: ignore[union-attr]
    before = [(size, each) for size, each in zip(source, along, strict=True) if not _is_one(size)]
    after = [size for size in call.shape if not _is_one(size)]
    if len(before) != len(after) or not all(_equal(one, other) for (one, _), other in zip(before, after, strict=True)):
        return None
    kept = iter(each for _, each in before)
    return [0 if _is_one(size) else next(kept) for size in call.shape]


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _equal(one: Any, other: Any) -> bool:
    """Whether two sizes are equal, known without a guard."""
    return bool(one == other) if isinstance(one, int) and isinstance(other, int) else str(one) == str(other)


def _sliced(call: _Call) -> Formula | None:
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
    if isinstance(known, Line):
        return Line(tuple(along), known.start + moved)
    return replace(known, along=tuple(along), cuts=tuple(cut - moved for cut in known.cuts))


def _indexed(call: _Call) -> Formula | None:
    """Elements at the positions of index tensors: a formula of formulas, if each dimension has an index, each a line."""
    source, indices = call.node.args
    known = call.found.get(source) if isinstance(source, fx.Node) else None
    if known is None or not isinstance(indices, list | tuple) or len(indices) != len(known.along):
        return None
    if not all(isinstance(each, fx.Node) and each.meta["val"].dtype is not torch.bool for each in indices):
        return None
    lines = [formula and _line(formula) for formula in map(call.formula, indices)]
    along, start = [0] * len(call.shape), 0
    for each, line in zip(known.along, lines, strict=True):
        if each and (line is None or line.start < 0 or min(line.along) < 0):  # a negative index counts from the end
            return None
        if each and line is not None:
            along = [one + each * other for one, other in zip(along, line.along, strict=True)]
            start += each * line.start
    if isinstance(known, Line):
        return Line(tuple(along), known.start + start)
    return replace(known, along=tuple(along), cuts=tuple(cut - start for cut in known.cuts))


def _triangle(keeps: Callable[[Any, Any], bool]) -> Rule:
    """The rule of `tril` and `triu`: zeros where column - row - diagonal does not keep the element."""

    def rule(call: _Call) -> Formula | None:
        known, diagonal = call.formula(call.argument(0, "self")), call.argument(1, "diagonal", 0)
        if known is None or not isinstance(diagonal, int):
            return None
        kept = _sign((*(0,) * (len(call.shape) - 2), -1, 1), -diagonal, keeps)
        return _combined(lambda value, stays: value if stays else type(value)(0), [known, kept])

    return rule


def _difference(call: _Call) -> Formula | None:
    """`diff` of neighbours along a dimension of a line; elements put before the first must continue the line."""
    known, at, before = call.formula(call.argument(0, "self")), call.argument(2, "dim", -1), call.argument(3, "prepend")
    line = known and _line(known)
    if line is None or call.argument(1, "n", 1) != 1 or call.argument(4, "append") is not None:
        return None
    if before is not None:
        dims, step = list(line.along), line.along[at]
        dims[at] = 0
        added = call.formula(before)
        if not _is_one(before.meta["val"].shape[at]) or (added and _line(added)) != Line(tuple(dims), line.start - step):
            return None
    return Steps((0,) * len(line.along), (), (line.along[at],))


def _running_sum(call: _Call) -> Formula | None:
    """`cumsum` of zeros."""
    known = call.formula(call.argument(0, "self"))
    return known if isinstance(known, Steps) and not any(known.values) else None


_RULES: dict[Any, Rule] = {
    **dict.fromkeys((aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias), _same),
    aten.unsqueeze: _with_dims(_unsqueezed),
    **dict.fromkeys((aten.expand, aten.expand_as, aten.broadcast_to), _with_dims(_expanded)),
    **dict.fromkeys((aten.view, aten.reshape, aten.squeeze, aten._unsafe_view), _with_dims(_reshaped)),
    aten.transpose: _with_dims(_transposed),
    aten.permute: _with_dims(_permuted),
    **dict.fromkeys((aten.slice, aten.select), _sliced),
    **dict.fromkeys((aten.bitwise_and, aten.__and__), _pointwise(operator.and_, 2)),
    **dict.fromkeys((aten.bitwise_or, aten.__or__), _pointwise(operator.or_, 2)),
    aten.bitwise_not: _pointwise(lambda value: not value if isinstance(value, bool) else ~value, 1),
    aten.logical_and: _pointwise(lambda one, other: bool(one and other), 2),
    aten.logical_or: _pointwise(lambda one, other: bool(one or other), 2),
    **{getattr(aten, name): _compared(getattr(operator, name)) for name in ("le", "lt", "ge", "gt", "eq", "ne")},
    **dict.fromkeys((aten.ones, aten.new_ones, aten.ones_like), _constant(0, "", 1)),
    **dict.fromkeys((aten.zeros, aten.new_zeros, aten.zeros_like), _constant(0, "", 0)),
    **dict.fromkeys((aten.full, aten.full_like), _constant(1, "fill_value")),
    aten.new_full: _constant(2, "fill_value"),
    aten.scalar_tensor: _constant(0, "s"),
    aten.logical_not: _pointwise(operator.not_, 1),
    aten.arange: _arange,
    aten.add: _sum(1),
    aten.sub: _sum(-1),
    aten.mul: _product,
    aten.where: _selected,
    aten.masked_fill: _filled,
    aten.index: _indexed,
    aten.tril: _triangle(operator.le),
    aten.triu: _triangle(operator.ge),
    aten.diff: _difference,
    aten.cumsum: _running_sum,
}
