"""Hoist step-invariant values: compute values of parameters, unwritten buffers and constants once per step, not per microbatch.

Contract: `find_step_invariants(joint)` marks such values (transposed or cast weights, tables, masks) with
`meta["step_invariant"]` and removes their stage. Every phase of a stage can then read them, so none is saved or sent. Not
hoisted: results of the graph; values that depend on a random number, a microbatch's input or an unmarked value; collectives,
checks, operators that are not torch's own; and a value of a parameter or buffer that several stages read, since each of them
would have to own the parameter.

Without `cheap`, the marked values depend on a parameter through a reduction or a product (the scale of a float8 weight, and the
weight cast by it), or such a value is computed from them. A compiler fuses all others into their readers.

`hoist_per_step(joint, staged)` removes the marked values from the phase graphs. A phase that reads one has the input
`StepInvariant(name)`; the stage's graph of phase HOIST computes them all. No bit changes. The values live until the end of the
step, and their bytes are not counted per microbatch.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import fx

from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, is_check, is_of_torch, is_tensor, reached, results_of
from graphpp.passes.graph.op_costs import is_cheap
from graphpp.passes.graph.stage_graphs import GraphResults, PhaseGraph, StagedGraphs, phase_graph
from graphpp.passes.joint.key_dropout_and_random_ops import draws_random_numbers
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, Phase

_STATE = (program.Parameter, program.Buffer)
_SOURCES = (*_STATE, program.Constant, program.Size)


def find_step_invariants(joint: JointGraph, cheap: bool = True) -> JointGraph:
    """Mark the values that can be computed once per step, in place; nodes need `meta["stage"]`."""
    refused: set[fx.Node] = {node for _, node in joint.outputs()}
    found = _invariants(joint, refused)
    while wrong := {node for node in found if not _can_be_input(node, found)}:
        refused |= wrong
        found = _invariants(joint, refused)
    for node in found if cheap else _costly(found):
        node.meta |= {"stage": None, "step_invariant": True}
    return joint


def _invariants(joint: JointGraph, refused: set[fx.Node]) -> dict[fx.Node, bool]:
    """The operations that depend only on parameters, buffers and constants, in order -> whether on parameters or buffers."""
    written = {role.fqn for role, _ in joint.outputs() if isinstance(role, program.BufferUpdate)}
    of_state: dict[fx.Node, bool] = {}
    found: dict[fx.Node, bool] = {}
    for node in joint.graph.nodes:
        role = node.meta.get("role")
        if isinstance(role, _SOURCES) and not (isinstance(role, program.Buffer) and role.fqn in written):
            of_state[node] = isinstance(role, _STATE)
        elif _repeats(node) and node not in refused and all(source in of_state for source in node.all_input_nodes):
            found[node] = of_state[node] = any(of_state[source] for source in node.all_input_nodes)
    return found


def _costly(found: Collection[fx.Node]) -> set[fx.Node]:
    """The values of parameters that operations other than cheap ones compute, those computed from them, and their sources."""
    of_parameter, costly = set[fx.Node](), set[fx.Node]()
    for node in found:
        sources = node.all_input_nodes
        if any(each in of_parameter or isinstance(each.meta.get("role"), program.Parameter) for each in sources):
            of_parameter.add(node)
            if not costly.isdisjoint(sources) or not (is_cheap(node) or node.target is operator.getitem):
                costly.add(node)
    return {node for node in reached(costly, lambda each: each.all_input_nodes) if node in found}


def _repeats(node: fx.Node) -> bool:
    """Whether an operation returns the same result each time, without side effects."""
    if node.target is operator.getitem:
        return True
    effect = is_check(node) or is_collective(node) or is_wait(node) or draws_random_numbers(node.target, node.args, node.kwargs)
    return node.op == "call_function" and is_of_torch(node) and not effect


def _can_be_input(node: fx.Node, found: dict[fx.Node, bool]) -> bool:
    """Whether a value can be an input: a tensor, read in one stage if it depends on a parameter or buffer and has a stage."""
    readers = [user for user in node.users if user not in found]
    if readers and not is_tensor(node):
        return False
    return node.meta["stage"] is None or not found[node] or len(_stages(node, found)) == 1


def _stages(node: fx.Node, found: dict[fx.Node, bool]) -> set[int | None]:
    """The stages that read a value, or a value computed from it, outside of `found`."""
    below = reached([node], lambda each: each.users if each is node or each in found else ())
    return {user.meta.get("stage") for user in below if user is not node and user not in found}


def hoist_per_step(joint: JointGraph, staged: StagedGraphs, spared: Collection[str] = ()) -> StagedGraphs:
    """Remove the marked values of `joint` from its phase graphs, and add graphs that compute them.

    `staged` stays unchanged. `spared`: the names of marked values that stay in the phase graphs.
    """
    order = {node: at for at, node in enumerate(joint.graph.nodes)}
    values = {node.name: node for node in order if node.meta.get("step_invariant") and node.name not in spared}
    graphs = {key: _with_invariants_as_inputs(each, values) for key, each in staged.graphs.items()}
    hoisted: dict[int, PhaseGraph] = {}
    for (_, stage), each in graphs.items():
        names = {role.name for role in each.inputs if isinstance(role, program.StepInvariant)}
        names |= {role.name for role in hoisted[stage].outputs} if stage in hoisted else set()  # type: ignore[union-attr]
        if names:
            hoisted[stage] = _computing([values[name] for name in names], order, stage)
    return replace(staged, graphs=graphs, hoisted=hoisted)


def _with_invariants_as_inputs(whole: PhaseGraph, hoisted: Collection[str]) -> PhaseGraph:
    end = whole.graph.output_node()
    computed = [node for node in whole.graph.nodes if node.op not in ("placeholder", "output")]
    rest = [node for node in computed if node.name not in hoisted]
    read = {source for node in [*rest, end] for source in node.all_input_nodes}
    inputs: dict[fx.Node, InputRole] = {
        node: node.meta["role"]
        for node in whole.graph.find_nodes(op="placeholder")
        if node in read or not isinstance(node.meta["role"], _SOURCES)
    }
    inputs |= {node: program.StepInvariant(node.name) for node in computed if node.name in hoisted and node in read}
    return phase_graph((whole.phase, whole.stage), inputs, rest, results_of(whole.graph))


def _computing(values: Sequence[fx.Node], order: Mapping[fx.Node, int], stage: int) -> PhaseGraph:
    """The graph of phase HOIST that computes these values; `order`: the position of each node of the joint graph."""
    results: GraphResults = [(program.StepInvariant(node.name), node) for node in sorted(values, key=order.__getitem__)]
    ordered = sorted(reached(values, lambda node: node.all_input_nodes), key=order.__getitem__)
    inputs = {node: node.meta["role"] for node in ordered if node.op == "placeholder"}
    return phase_graph((Phase.HOIST, stage), inputs, [node for node in ordered if node not in inputs], results)
