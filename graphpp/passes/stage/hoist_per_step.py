"""Prepare: what depends on parameters, unwritten buffers and constants alone is made once per step, not once per microbatch.

Contract
--------
`find_step_invariants(joint)` marks such values (`meta["step_invariant"]`) and takes their stage away:
transposed or cast weights, tables, masks.
A stage's phases all have them at hand, so that none is saved or sent. Left as they were: results; random numbers and
whatever another input goes into; collectives, checks, operators that are not torch's own; and what comes of a parameter or
buffer and is read in several stages, for it would bring the parameter to all of them.

`hoist_per_step(joint, staged)` takes the marked values out of the graphs of a cut: where one of them is read, it is the input
`StepInvariant(name)`; the graph of phase HOIST of the stage makes them all. Same operations on the same values: no bit changes.
They live as long as the step, which for a view costs nothing, and for a cast weight its bytes; they are not counted per
microbatch.
"""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import JointGraph, is_check, is_tensor
from graphpp.passes.graph.stage_graphs import GraphResults, PhaseGraph, StagedGraphs, phase_graph
from graphpp.passes.joint.key_random_ops import draws_random_numbers
from graphpp.runtime import program
from graphpp.runtime.program import InputRole, Phase

_STATE = (program.Parameter, program.Buffer)
_AT_HAND = (*_STATE, program.Constant)


def find_step_invariants(joint: JointGraph) -> JointGraph:
    """Mark the values that can be made once per step, in place; nodes carry `meta["stage"]` (see assign)."""
    refused: set[fx.Node] = {node for _, node in joint.outputs()}
    while True:
        found = _at_hand(joint, refused)
        wrong = {node for node in found if not _in_one_place(node, found)}
        if not wrong:
            break
        refused |= wrong
    for node in found:
        node.meta |= {"stage": None, "step_invariant": True}
    return joint


def _at_hand(joint: JointGraph, refused: set[fx.Node]) -> dict[fx.Node, bool]:
    """The operations whose inputs are all at hand, in order; whether a parameter or buffer goes into them."""
    written = {role.fqn for role, _ in joint.outputs() if isinstance(role, program.BufferUpdate)}
    of_state: dict[fx.Node, bool] = {}
    found: dict[fx.Node, bool] = {}
    for node in joint.graph.nodes:
        role = node.meta.get("role")
        if isinstance(role, program.Parameter | program.Constant) or (
            isinstance(role, program.Buffer) and role.fqn not in written
        ):
            of_state[node] = isinstance(role, _STATE)
        elif _repeats(node) and node not in refused and all(source in of_state for source in node.all_input_nodes):
            found[node] = of_state[node] = any(of_state[source] for source in node.all_input_nodes)
    return found


def _repeats(node: fx.Node) -> bool:
    """Whether an operation gives the same whenever it runs, and does nothing else."""
    if node.target is operator.getitem:
        return True
    own = getattr(node.target, "namespace", "") in ("aten", "prims")
    effect = is_check(node) or is_collective(node) or is_wait(node) or draws_random_numbers(node.target, node.args, node.kwargs)
    return node.op == "call_function" and own and not effect


def _in_one_place(node: fx.Node, found: dict[fx.Node, bool]) -> bool:
    """Whether a value can be handed to its readers: one tensor, and in one stage if it comes of a parameter or buffer.

    What has no stage is made in every stage that reads it already.
    """
    readers = [user for user in node.users if user not in found]
    if readers and not is_tensor(node):
        return False
    return node.meta["stage"] is None or not found[node] or len(_stages(node, found)) == 1


def _stages(node: fx.Node, found: dict[fx.Node, bool]) -> set[int | None]:
    """Where a value, or what is made of it, is read."""
    stages: set[int | None] = set()
    pending, seen = [node], {node}
    while pending:
        for user in pending.pop().users:
            if user not in found:
                stages.add(user.meta.get("stage"))
            elif user not in seen:
                seen.add(user)
                pending.append(user)
    return stages


def hoist_per_step(joint: JointGraph, staged: StagedGraphs) -> StagedGraphs:
    """Take what was marked out of the graphs of a cut of `joint`; graphs of `staged` stay as they are."""
    slots = {slot: _reading(whole) for slot, whole in staged.graphs.items()}
    prepared: dict[int, PhaseGraph] = {}
    for (_, stage), slot in slots.items():
        names = {role.name for role in slot.inputs if isinstance(role, program.StepInvariant)}
        names |= {role.name for role in prepared[stage].outputs} if stage in prepared else set()  # type: ignore[union-attr]
        if names:
            prepared[stage] = _making(joint, stage, names)
    return replace(staged, graphs=slots, hoisted=prepared)


def _reading(whole: PhaseGraph) -> PhaseGraph:
    """A slot whose prepared values are inputs."""
    end = whole.graph.output_node()
    computed = [node for node in whole.graph.nodes if node.op not in ("placeholder", "output")]
    rest = [node for node in computed if not node.meta.get("step_invariant")]
    read = {source for node in [*rest, end] for source in node.all_input_nodes}
    inputs: dict[fx.Node, InputRole] = {
        node: node.meta["role"]
        for node in whole.graph.find_nodes(op="placeholder")
        if node in read or not isinstance(node.meta["role"], _AT_HAND)
    }
    inputs |= {node: program.StepInvariant(node.name) for node in computed if node.meta.get("step_invariant") and node in read}
    results: GraphResults = list(zip(whole.outputs, end.args[0], strict=True))  # type: ignore[arg-type]
    return phase_graph((whole.phase, whole.stage), inputs, rest, results)


def _making(joint: JointGraph, stage: int, names: set[str]) -> PhaseGraph:
    """The graph that makes the values with these names."""
    results: GraphResults = [(program.StepInvariant(node.name), node) for node in joint.computed() if node.name in names]
    needed: set[fx.Node] = set()
    pending = [node for _, node in results]
    while pending:
        node = pending.pop()
        if node not in needed:
            needed.add(node)
            pending += node.all_input_nodes
    ordered = [node for node in joint.graph.nodes if node in needed]
    inputs = {node: node.meta["role"] for node in ordered if node.op == "placeholder"}
    return phase_graph((Phase.HOIST, stage), inputs, [node for node in ordered if node not in inputs], results)
