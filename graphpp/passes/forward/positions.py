"""Find the tensors of a graph that depend on positions alone, such as masks, as formulas over the indices of their elements.

Contract of `positions`
- A formula (`formulas.py`) holds for every input of the graph, and for every value of its symbolic sizes. The analysis never
  guesses: operations without a rule in `_RULES`, combinations of comparisons in two directions, values that a dtype may round,
  and memory that an in-place operation writes have no formula.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from graphpp.passes.forward.formulas import Formula, Line, Number, Steps, as_line, combined, converted, sign, simplified
from graphpp.passes.forward.moves import MOVES, Call, Rule, is_one

aten = torch.ops.aten


def positions(graph: fx.Graph, any_size: bool = False) -> dict[fx.Node, Formula]:
    """The formulas of the nodes that depend on positions alone. Nodes need their tensor in `meta["val"]`.

    `any_size`: a size above 1 may have any value, as if it were symbolic.
    """
    written, found = _written(graph), dict[fx.Node, Formula]()
    for node in graph.nodes:
        rule, value = _RULES.get(getattr(node.target, "overloadpacket", node.target)), node.meta.get("val")
        if rule is None or not isinstance(value, torch.Tensor) or node in written:
            continue
        sizes = [_greatest(size, any_size) for size in value.shape]
        formula = rule(Call(node, value.shape, sizes, found))
        exact = formula and converted(formula, value.dtype)
        if exact is not None:
            found[node] = simplified(exact, sizes)
    return found


def _greatest(size: Any, any_size: bool) -> float:
    """How large a size may be; a tensor without elements takes the formula of one with elements."""
    return math.inf if not isinstance(size, int) or (any_size and size > 1) else max(size, 1)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose memory an operation of the graph writes."""
    memory, written = dict[fx.Node, set[fx.Node]](), set[fx.Node]()
    for node in graph.nodes:
        memory[node] = set[fx.Node]().union(*(memory[each] for each in _may_share(node))) or {node}
        fx.node.map_arg(_writes(node), lambda each: written.update(memory[each]))
    return {node for node in graph.nodes if memory[node] & written}


def _may_share(node: fx.Node) -> list[fx.Node]:
    """The arguments in whose memory the result may lie: the first. Composite operations such as `dropout` do not declare it."""
    first, schema = list[fx.Node](), getattr(node.target, "_schema", None)
    declared = schema is not None and any(each.alias_info for each in schema.returns)
    composite = schema is not None and node.target.has_kernel_for_dispatch_key("CompositeImplicitAutograd")  # type: ignore[union-attr]
    if declared or composite or node.target is operator.getitem:
        fx.node.map_arg(node.args[:1], first.append)
    return first


def _writes(node: fx.Node) -> Any:
    """The arguments that an operation writes; one without a schema, such as a Triton kernel, may write all."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [] if node.target is operator.getitem or node.op == "output" else node.all_input_nodes
    if not schema.is_mutable or node.target is aten.detach_.default:
        return []
    given = dict(zip((each.name for each in schema.arguments), node.args, strict=False)) | node.kwargs
    return [given.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]


def _pointwise(function: Callable[..., Number], count: int) -> Rule:
    """The rule of an operation on the values of `count` arguments, of which all that vary have one direction."""

    def rule(call: Call) -> Formula | None:
        known = call.formulas(count)
        return None if known is None else combined(function, known)

    return rule


def _compared(function: Callable[[Any, Any], bool]) -> Rule:
    """The rule of a comparison of two lines, or of steps with a number."""

    def rule(call: Call) -> Formula | None:
        known = call.operands()
        if known is None:
            return None
        lines = [as_line(each) for each in known]
        if None in lines or not any(isinstance(each, Line) for each in known):
            return combined(function, known)
        one, other = (each for each in lines if each is not None)
        along = tuple(map(operator.sub, one.along, other.along))
        return sign(along, one.start - other.start, function)

    return rule


def _sum(sign: int) -> Rule:
    """The rule of a sum or difference of lines, or of constants."""

    def rule(call: Call) -> Formula | None:
        known = call.operands()
        if known is None or call.argument(2, "alpha", 1) != 1:
            return None
        lines = [as_line(each) for each in known]
        if None in lines:
            return combined(lambda one, other: one + sign * other, known)
        one, other = (each for each in lines if each is not None)
        return Line(tuple(a + sign * b for a, b in zip(one.along, other.along, strict=True)), one.start + sign * other.start)

    return rule


def _product(call: Call) -> Formula | None:
    known = call.operands()
    if known is None:
        return None
    for one, other in (known, known[::-1]):
        factor = as_line(other)
        if isinstance(one, Line) and factor is not None and not any(factor.along):
            return Line(tuple(each * factor.start for each in one.along), one.start * factor.start)
    return combined(operator.mul, known)


def _selected(call: Call) -> Formula | None:
    known = call.formulas(3)
    return None if known is None else combined(lambda chosen, one, other: one if chosen else other, known)


def _filled(call: Call) -> Formula | None:
    known = call.formulas(3)
    return None if known is None else combined(lambda value, masked, other: other if masked else value, known)


def _arange(call: Call) -> Formula | None:
    start = 0 if call.node.target is aten.arange.default else call.argument(0, "start")
    step = call.argument(2, "step", 1) if call.node.target is aten.arange.start_step else 1
    integer = isinstance(start, int) and isinstance(step, int) and not call.node.meta["val"].is_floating_point()
    return Line((step,), start) if integer else None


def _constant(at: int, name: str, default: Number | None = None) -> Rule:
    """The rule of a tensor filled with its argument `at`, or with `default`."""

    def rule(call: Call) -> Formula | None:
        return call.formula(call.argument(at, name) if default is None else default)

    return rule


def _same(call: Call) -> Formula | None:
    return call.formula(call.argument(0, "self"))


def _triangle(keeps: Callable[[Any, Any], bool]) -> Rule:
    """The rule of `tril` and `triu`: zeros where column - row - diagonal does not keep the element."""

    def rule(call: Call) -> Formula | None:
        known, diagonal = call.formula(call.argument(0, "self")), call.argument(1, "diagonal", 0)
        if known is None or not isinstance(diagonal, int):
            return None
        kept = simplified(sign((*(0,) * (len(call.shape) - 2), -1, 1), -diagonal, keeps), call.sizes)
        return combined(lambda value, stays: value if stays else type(value)(0), [known, kept])

    return rule


def _difference(call: Call) -> Formula | None:
    """`diff` of neighbours along a dimension of a line; elements put before the first must continue the line."""
    known, at, before = call.formula(call.argument(0, "self")), call.argument(2, "dim", -1), call.argument(3, "prepend")
    line = None if known is None else as_line(known)
    if line is None or call.argument(1, "n", 1) != 1 or call.argument(4, "append") is not None:
        return None
    if before is not None:
        dims, step = list(line.along), line.along[at]
        dims[at] = 0
        added = call.formula(before)
        if not is_one(before.meta["val"].shape[at]) or (added and as_line(added)) != Line(tuple(dims), line.start - step):
            return None
    return Steps((0,) * len(line.along), (), (line.along[at],))


def _running_sum(call: Call) -> Formula | None:
    """`cumsum` of zeros."""
    known = call.formula(call.argument(0, "self"))
    return known if isinstance(known, Steps) and not any(known.values) else None


_RULES: dict[Any, Rule] = {
    **MOVES,
    **dict.fromkeys((aten.to, aten._to_copy, aten.clone, aten.contiguous, aten.detach, aten.alias), _same),
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
    aten.tril: _triangle(operator.le),
    aten.triu: _triangle(operator.ge),
    aten.diff: _difference,
    aten.cumsum: _running_sum,
}
