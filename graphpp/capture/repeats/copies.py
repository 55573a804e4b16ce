"""Put copies of a traced call's nodes in place of the operators that stand for the other calls.

Contract
--------
- `with_copies` takes a joint graph with the operators of `stand_ins.py` and returns one without them, with the nodes, the
  order, the names and the metadata of a trace of all calls. Positions increase in the order of the forward. As in a trace, an
  operation of the forward and the operations of its backward have one sequence number.
- `DifferentError` is raised if a copy may differ from a trace: the caller then traces all calls. The sum of several gradients
  of one tensor depends on their order, so no operation beside a call may read a tensor for which the call makes a gradient.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp.capture.activation_checkpoints import checkpointed_call, with_checkpointed_call
from graphpp.capture.repeats import stand_ins
from graphpp.capture.repeats.exported_calls import layouts
from graphpp.capture.repeats.proof import calls_of_copy, prove_equal
from graphpp.capture.repeats.segments import (
    Markers,
    Outer,
    Segment,
    calls_around,
    is_marker,
    results_with_gradient,
    segment_of,
)
from graphpp.capture.repeats.stand_ins import Call, CallKind, CallTable, DifferentError
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.runtime import program

_NUMBER = re.compile(r"_\d+$")
_STANDING = (stand_ins.STAND_IN, stand_ins.STAND_IN_GRAD)


def with_copies(joint: JointGraph, calls: CallTable) -> JointGraph:
    """The graph of all calls. Raises `DifferentError` if a copy may differ from a trace."""
    if not calls.calls:
        return joint
    markers = Markers(joint.graph, calls)
    _refuse_other_readers(joint.graph, calls)
    segments = {call.number: segment for kind in calls.kinds for call, segment in _proven(joint, kind, markers)}
    return _Copier(joint, markers, segments, calls).copied()


def _proven(joint: JointGraph, kind: CallKind, markers: Markers) -> Iterator[tuple[Call, Segment]]:
    """Each replaced call of a kind, with the nodes of the first traced call, which equal those of the second one."""
    first, second = (segment_of(joint, call, markers) for call in kind.traced)
    prove_equal(first, second)
    for call in kind.replaced:
        _check_layouts(call, first, markers)
        yield call, first


def _refuse_other_readers(graph: fx.Graph, calls: CallTable) -> None:
    """Raise `DifferentError` if an operation beside a call reads a tensor for which the call makes a gradient.

    The exported graph has been searched for such operations, but the joint trace may have made others.
    """
    markers = Markers(graph, calls)
    for call in calls.calls:
        standing = markers.find(stand_ins.STAND_IN, call)
        node = standing or markers.find(stand_ins.INPUTS, call)
        given = [] if node is None else list(node.args[0])  # type: ignore[arg-type]
        parameters = given[len(call.inputs) :][: len(call.trained)]
        trained = given if standing is None else [given[at] for at in call.inputs_with_grad()] + parameters
        for source in trained:
            if given.count(source) > 1 or _readers(source) != {node}:
                raise DifferentError(call, f"is not the only reader of {source.name}, a tensor that gets a gradient")


def _readers(node: fx.Node) -> set[fx.Node]:
    """The operations of the forward that read a value, but for those that cut it off from the backward."""
    users = (user for user in node.users if user.op != "output" and user.target is not torch.ops.aten.detach.default)
    return {user for user in users if not user.meta.get("backward")}


def _check_layouts(call: Call, segment: Segment, markers: Markers) -> None:
    """Raise `DifferentError` if a stand-in gives or gets gradients with other strides than the traced call."""
    given = [node.meta["val"] for node in markers.given(stand_ins.STAND_IN_GRAD, call)]
    theirs = [node.meta["val"] for node in markers.given(stand_ins.RESULTS_GRAD, segment.call)]
    results = [results_with_gradient(each, markers) for each in (call, segment.call)]
    if results[0] != results[1] or layouts(given) != layouts(theirs):
        raise DifferentError(call, f"gets gradients of other results, or with other strides, than {segment.call.fqn}")
    made = [segment.results.get(("input", at)) for at in call.inputs_with_grad()]
    made += [segment.results.get(("Parameter", name)) for name in call.trained_names]
    for node, layout in zip(made, call.gradients(given), strict=True):
        if node is not None and layouts(node.meta["val"]) != layouts(layout.empty()):
            raise DifferentError(call, f"makes a gradient with other strides than expected: {describe_node(node)}")


class _Copier:
    """Makes one new graph, node by node in order."""

    def __init__(
        self,
        joint: JointGraph,
        markers: Markers,
        segments: Mapping[int, Segment],
        calls: CallTable,
    ) -> None:
        self._joint, self._markers, self._segments = joint, markers, segments
        self._calls = calls.calls
        self._graph = fx.Graph()
        self._new: dict[fx.Node, Any] = {}  # by the node of the old graph; None for a gradient that a call does not make
        self._copies: dict[int, dict[fx.Node, Any]] = defaultdict(dict)  # by the number of the call and the node of the segment
        self._order: list[tuple[fx.Node, tuple[int, ...]]] = []  # the new nodes, and tuples in the order of sequence numbers
        self._state = joint.inputs()

    def copied(self) -> JointGraph:
        """The new graph."""
        for node in self._joint.graph.nodes:
            if node.target in _STANDING:
                self._copy_segment(self._calls[int(node.args[1])], node)
            elif node.op == "output":
                self._graph.output(())
                self._graph.output_node().meta = dict(node.meta)
            elif not is_marker(node):
                self._new[node] = self._copy(node, self._new.__getitem__, (node.meta.get("seq", -1),))
            elif node.target is operator.getitem:
                self._new[node] = self._behind(node)
        joint = replace(self._joint, module=aot.graph_module(self._joint.module, self._graph))
        for role, node in self._joint.outputs():
            if isinstance(role, program.BufferUpdate) and is_marker(node):
                raise DifferentError(self._call_of(node), f"gives the new value of {role.fqn}")
        outputs = ((role, self._new[node]) for role, node in self._joint.outputs())
        joint.set_outputs([(role, node) for role, node in outputs if node is not None])
        self._eliminate_dead_code()
        self._number_nodes()
        return joint

    def _eliminate_dead_code(self) -> None:
        """As torch does, since the operators read every input and result of a call. What nobody read before, stays."""
        unread = {node for node in self._joint.graph.nodes if not node.users and not is_marker(node)}
        places = (self._new, *self._copies.values())
        kept = {new for copies in places for node, new in copies.items() if node in unread}
        self._graph.eliminate_dead_code(lambda node: node.is_impure() or node in kept)

    def _copy(self, node: fx.Node, new: Callable[[fx.Node], Any], order: tuple[int, ...]) -> fx.Node:
        """A copy of a node, which is named by the operator as the nodes of a trace are."""
        name = node.name if node.op == "placeholder" else _NUMBER.sub("", node.name)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), new)
        copy = self._graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        copy.meta = dict(node.meta)
        self._order.append((copy, order))
        return copy

    def _behind(self, item: fx.Node) -> Any:
        """The value of an item of an operator's results."""
        source, at = item.args
        assert isinstance(source, fx.Node) and isinstance(at, int)
        if source.target not in _STANDING:
            return self._new[source.args[0][at]]  # type: ignore[index]
        call = self._call_of(item)
        keys: list[Outer] = [("result", at) for at in range(len(call.kind.results))]
        if source.target is stand_ins.STAND_IN_GRAD:
            keys = [("input", at) for at in call.inputs_with_grad()]
            keys += [("Parameter", name) for name in call.trained_names]
        segment = self._segments[call.number]
        return self._value(call, segment.results[keys[at]]) if keys[at] in segment.results else None

    def _call_of(self, item: fx.Node) -> Call:
        """The call of an item of an operator's results."""
        return self._calls[int(item.args[0].args[1])]  # type: ignore[arg-type, union-attr]

    def _copy_segment(self, call: Call, standing: fx.Node) -> None:
        """Copy the forward or the backward of the traced call for another call."""
        segment, copies = self._segments[call.number], self._copies[call.number]
        forward = standing.target is stand_ins.STAND_IN
        first = standing if forward else self._markers.one(stand_ins.STAND_IN, call)
        checkpoints = dict(zip(segment.call.checkpoints, call.checkpoints, strict=True))
        for node in segment.forward if forward else segment.backward:
            # Numbers of the call itself are told apart by call. A sum of gradients has a number from after the whole forward.
            own = node.meta["seq"] in segment.sequence
            order = (first.meta["seq"], node.meta["seq"]) if own else (node.meta["seq"],)
            copies[node] = copy = self._copy(node, partial(self._value, call), order)
            copy.meta["calls"] = calls_of_copy(node, segment.call, call, calls_around(first, call))
            number = checkpointed_call(node)
            copy.meta = with_checkpointed_call(copy.meta, None if number is None else checkpoints[number])

    def _value(self, call: Call, node: fx.Node) -> Any:
        """The value that takes the place of a traced call's node, or of a value that the traced call reads, in another call."""
        segment, copies = self._segments[call.number], self._copies[call.number]
        if node in copies:
            return copies[node]
        kind, which = segment.outer[node]
        if kind == "input":
            return self._new[self._markers.given(stand_ins.STAND_IN, call)[which]]
        if kind == "gradient":
            place = results_with_gradient(call, self._markers).index(which)
            return self._new[self._markers.given(stand_ins.STAND_IN_GRAD, call)[place]]
        if kind == "constant":
            place = len(call.inputs) + len(call.trained) + which
            return self._new[self._markers.given(stand_ins.STAND_IN, call)[place]]
        fqn = f"{call.fqn}.{which}"
        role = program.Parameter(fqn) if kind == "Parameter" else program.Buffer(fqn)
        return self._new[self._state[role]]

    def _number_nodes(self) -> None:
        """Number the forward's nodes, and give all nodes sequence numbers in order."""
        keys = sorted({order for _, order in self._order})
        numbers = {key: at for at, key in enumerate(key for key in keys if key != (-1,))} | {(-1,): -1}
        position = 0
        remaining = set(self._graph.nodes)
        for node, order in self._order:
            if node.op != "placeholder" and node in remaining:
                node.meta["seq"] = numbers[order]
                node.meta["position"] = -1 if node.meta["backward"] else position
                position += not node.meta["backward"]
