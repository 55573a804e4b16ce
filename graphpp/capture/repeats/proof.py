"""Prove that the traced calls of two members of a group have equal nodes.

Contract: `prove_equal` raises `DifferentError` unless both calls have the same operations in the same order, with the same
arguments, shapes, source lines and names of submodules, and the same results.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from graphpp.capture.activation_checkpoints import checkpointed_call
from graphpp.capture.repeats.exported_calls import layouts, relative
from graphpp.capture.repeats.segments import Segment
from graphpp.capture.repeats.stand_ins import Call, DifferentError
from graphpp.passes.graph.joint_graph import describe_node


def prove_equal(one: Segment, other: Segment) -> None:
    """Raise `DifferentError` at the first difference between two calls."""
    _Proof(one, other).check()


class _Proof:
    """Compares the nodes of two traced calls."""

    def __init__(self, one: Segment, other: Segment) -> None:
        self._one, self._other = one, other
        self._twins: dict[fx.Node, fx.Node] = {}
        pairs = zip(one.call.checkpoints, other.call.checkpoints, strict=True)
        self._checkpoints: dict[int | None, int | None] = {None: None, **dict(pairs)}

    def check(self) -> None:
        """Raise `DifferentError` at the first difference."""
        one, other = self._one, self._other
        lengths = [(len(each.forward), len(each.backward)) for each in (one, other)]
        if lengths[0] != lengths[1]:
            self._refuse("more or fewer operations")
        for a, b in zip(one.nodes(), other.nodes(), strict=True):
            if not self._equal_nodes(a, b):
                self._refuse(f"{describe_node(a)}, {a.name} and {b.name}")
            self._twins[a] = b
        if one.results.keys() != other.results.keys():
            self._refuse("other values get gradients")
        if not all(self._equal(node, other.results[key]) for key, node in one.results.items()):
            self._refuse("other results")
        if _ranks(one) != _ranks(other):
            self._refuse("another order")

    def _refuse(self, where: str) -> None:
        raise DifferentError(self._one.call, f"has another graph than {self._other.call.fqn}: {where}")

    def _equal_nodes(self, a: fx.Node, b: fx.Node) -> bool:
        calls = calls_of_copy(a, self._one.call, self._other.call, self._other.around)
        same = a.op == b.op and a.target == b.target and a.meta["source"] == b.meta["source"] and calls == b.meta["calls"]
        return (
            same
            and self._equal((a.args, a.kwargs), (b.args, b.kwargs))
            and layouts(a.meta["val"]) == layouts(b.meta["val"])
            and self._checkpoints.get(checkpointed_call(a)) == checkpointed_call(b)
        )

    def _equal(self, a: Any, b: Any) -> bool:
        if isinstance(a, fx.Node):
            if a in self._one.outer:
                return bool(self._one.outer[a] == self._other.outer.get(b))
            return self._twins.get(a) is b
        if isinstance(a, Mapping):
            return isinstance(b, Mapping) and a.keys() == b.keys() and all(self._equal(a[key], b[key]) for key in a)
        if isinstance(a, list | tuple):
            return isinstance(b, list | tuple) and len(a) == len(b) and all(map(self._equal, a, b))
        if isinstance(a, slice):
            return isinstance(b, slice) and self._equal((a.start, a.stop, a.step), (b.start, b.stop, b.step))
        return type(a) is type(b) and repr(a) == repr(b)


def _ranks(segment: Segment) -> list[int]:
    """The order of the sequence numbers of a call's nodes."""
    numbers = sorted({node.meta["seq"] for node in segment.nodes()})
    ranks = {number: rank for rank, number in enumerate(numbers)}
    return [ranks[node.meta["seq"]] for node in segment.nodes()]


def calls_of_copy(node: fx.Node, call: Call, other: Call, around: tuple[str, ...]) -> tuple[str, ...]:
    """The module calls around a node of one call, as they would be around the same node of another call within `around`."""
    names: tuple[str, ...] = node.meta["calls"]
    if call.name not in names:
        return names
    return (*around, *(relative(name, call.fqn, other.fqn) for name in names[names.index(call.name) :]))
