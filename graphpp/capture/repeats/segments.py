"""Find the nodes of the traced calls of repeated modules in a joint graph.

Contract: a `Segment` has the nodes of one traced call and names every value that its nodes read from outside: an input, the
gradient of a result, a constant, a parameter or buffer of the member. `DifferentError` is raised if a value enters or leaves by
another way than the operators of `stand_ins.py`: a copy of the nodes would then lose a value that the call reads or gives.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpp.capture.repeats import stand_ins
from graphpp.capture.repeats.stand_ins import Call, CallTable, DifferentError, Layout
from graphpp.passes.graph.joint_graph import JointGraph, describe_node
from graphpp.runtime import program

OPERATORS = (
    stand_ins.INPUTS, stand_ins.CONSTANTS, stand_ins.RESULTS, stand_ins.CONSTANT_RESULTS, stand_ins.INPUTS_GRAD,
    stand_ins.RESULTS_GRAD, stand_ins.STAND_IN, stand_ins.STAND_IN_GRAD,
)  # fmt: skip

# A value outside of a call that its nodes read or give: ("input", i), ("gradient", i) of a result, ("result", i),
# ("constant", i), or the state of the member, as ("Parameter", name) and ("Buffer", name).
Outer = tuple[str, Any]


class Markers:
    """The nodes of the operators of one graph, by operator and number of the call."""

    def __init__(self, graph: fx.Graph, calls: CallTable) -> None:
        self._calls = calls
        self._nodes: dict[tuple[Any, int], fx.Node] = {}
        for target in OPERATORS:
            for node in graph.find_nodes(op="call_function", target=target):
                self._nodes[target, int(node.args[1])] = node

    def find(self, target: Any, call: Call) -> fx.Node | None:
        return self._nodes.get((target, call.number))

    def one(self, target: Any, call: Call) -> fx.Node:
        """The node of an operator; raises `DifferentError` if the trace has lost it."""
        node = self.find(target, call)
        if node is None:
            raise DifferentError(call, "lies in a region of its own, or no value of the graph depends on the call")
        return node

    def given(self, target: Any, call: Call) -> list[fx.Node]:
        """The tensors that an operator takes; none if the graph has no such operator."""
        node = self.find(target, call)
        return [] if node is None else list(node.args[0])  # type: ignore[arg-type]

    def gradients(self, target: Any, call: Call) -> list[int]:
        """The indices of the results of `target` for which the call's backward gets gradients."""
        return self._calls.arrived.get((target, call.number), [])

    def items(self, target: Any, call: Call) -> dict[int, fx.Node]:
        """The results of an operator that are read, by index."""
        node = self.find(target, call)
        return {} if node is None else {int(user.args[1]): user for user in node.users}  # type: ignore[arg-type]


@dataclass(frozen=True)
class Segment:
    """The nodes of one traced call, and the values outside of it that they read."""

    call: Call
    forward: list[fx.Node]
    backward: list[fx.Node]
    outer: Mapping[fx.Node, Outer]
    results: Mapping[Outer, fx.Node]  # ("result", i) and the gradients ("input", i), ("Parameter", name)
    around: tuple[str, ...]  # the module calls around the member
    sequence: range  # the sequence numbers that autograd gave to operations of the call; empty without gradients

    def nodes(self) -> list[fx.Node]:
        return [*self.forward, *self.backward]


def segment_of(joint: JointGraph, call: Call, markers: Markers) -> Segment:
    """The nodes of a traced call. Raises `DifferentError` if values enter or leave by other ways than the operators."""
    forward = [node for node in _nodes_of(joint.graph, call) if not is_marker(node)]
    backward = _backward_nodes(joint.graph, call, markers)
    results: dict[Outer, fx.Node] = {("result", at): node for at, node in _results(call, markers).items()}
    results |= {("input", at): node for at, node in _input_gradients(call, markers).items()}
    roles = dict(joint.outputs())
    for name in call.trained_names:
        gradient = roles.get(program.Gradient(f"{call.fqn}.{name}"))
        if gradient is not None:
            results["Parameter", name] = gradient
    marker = markers.find(stand_ins.RESULTS, call) or markers.one(stand_ins.CONSTANT_RESULTS, call)
    outer = _outer_values(joint, call, markers)
    first = markers.find(stand_ins.INPUTS, call)
    sequence = range(0) if first is None else range(first.meta["seq"], marker.meta["seq"])
    segment = Segment(call, forward, backward, outer, results, calls_around(marker, call), sequence)
    _check_closed(joint, segment)
    return segment


def _nodes_of(graph: fx.Graph, call: Call) -> list[fx.Node]:
    """The forward's nodes within a call of a module."""
    computed = (node for node in graph.nodes if node.op not in ("placeholder", "output") and not node.meta["backward"])
    return [node for node in computed if call.name in node.meta["calls"]]


def calls_around(marker: fx.Node, call: Call) -> tuple[str, ...]:
    """The module calls around the member, from the calls of an operator within the call."""
    names: tuple[str, ...] = marker.meta["calls"]
    return names[: names.index(call.name)]


def is_marker(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.target in OPERATORS


def _backward_nodes(graph: fx.Graph, call: Call, markers: Markers) -> list[fx.Node]:
    """The nodes between the operators that mark the gradients of the results and of the inputs.

    Autograd runs the operation that came last in the forward first, so no operation of another call comes between. Raises
    `DifferentError` if one does.
    """
    if not call.inputs_with_grad():
        return []
    node, end = markers.one(stand_ins.RESULTS_GRAD, call), markers.one(stand_ins.INPUTS_GRAD, call)
    found = []
    while (node := node.next) is not end:
        if node.op == "output" or not node.meta["backward"]:
            raise DifferentError(call, "has a backward that is not in one piece")
        if not is_marker(node):
            found.append(node)
    return found


def _split(layouts: Sequence[Layout]) -> tuple[list[int], list[int]]:
    """The indices of the tensors that get gradients, and of the others."""
    trained = [at for at, each in enumerate(layouts) if each.requires_grad]
    return trained, [at for at, each in enumerate(layouts) if not each.requires_grad]


def _results(call: Call, markers: Markers) -> dict[int, fx.Node]:
    """The nodes of a traced call's results, by index."""
    trained, constant = _split(call.kind.results)
    found = dict(zip(trained, markers.given(stand_ins.RESULTS, call), strict=False))
    return found | dict(zip(constant, markers.given(stand_ins.CONSTANT_RESULTS, call), strict=False))


def _input_gradients(call: Call, markers: Markers) -> dict[int, fx.Node]:
    inputs, given = call.inputs_with_grad(), markers.given(stand_ins.INPUTS_GRAD, call)
    if len(given) != len(inputs):
        raise DifferentError(call, "takes a tensor that requires grad and makes no gradient for it")
    return {inputs[at]: node for at, node in zip(markers.gradients(stand_ins.INPUTS, call), given, strict=True)}


def results_with_gradient(call: Call, markers: Markers) -> list[int]:
    """The indices of the results of a call for which its backward gets gradients."""
    if markers.find(stand_ins.STAND_IN, call) is not None:
        return markers.gradients(stand_ins.STAND_IN, call)
    trained, _ = _split(call.kind.results)
    return [trained[at] for at in markers.gradients(stand_ins.RESULTS, call)]


def _outer_values(joint: JointGraph, call: Call, markers: Markers) -> dict[fx.Node, Outer]:
    """The values that a traced call may read: its inputs, the gradients of its results, the state of its member."""
    inputs, constants = _split(call.inputs)
    results = results_with_gradient(call, markers)
    found: dict[fx.Node, Outer] = {}
    for target, name, places in (
        (stand_ins.INPUTS, "input", inputs),
        (stand_ins.CONSTANTS, "input", constants),
        (stand_ins.RESULTS_GRAD, "gradient", results),
    ):
        found |= {node: (name, places[at]) for at, node in markers.items(target, call).items()}
    for role, node in joint.inputs().items():
        if isinstance(role, program.Parameter | program.Buffer) and role.fqn.startswith(f"{call.fqn}."):
            found[node] = (type(role).__name__, role.fqn.removeprefix(f"{call.fqn}."))
        elif isinstance(role, program.Constant):
            for at, tensor in enumerate(call.constants):
                if tensor is joint.constants[role.name]:
                    found[node] = ("constant", at)
    return found


def _check_closed(joint: JointGraph, segment: Segment) -> None:
    """Raise `DifferentError` if a node of a call reads another value, or another node reads a value of the call."""
    call, inside = segment.call, set(segment.nodes())
    returned = {program.Gradient(f"{call.fqn}.{name}") for name in call.trained_names}
    for node in inside:
        for source in node.all_input_nodes:
            if source not in inside and source not in segment.outer:
                raise DifferentError(call, f"reads {source.name}, which is no argument, in {describe_node(node)}")
        if any(user not in inside and user.op != "output" and not is_marker(user) for user in node.users):
            raise DifferentError(call, f"has a value that is read outside of it: {describe_node(node)}")
    if any(node in inside and role not in returned for role, node in joint.outputs()):
        raise DifferentError(call, "writes a buffer, or has a value that is a result of the step")
