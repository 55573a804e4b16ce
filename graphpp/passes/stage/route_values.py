"""Route values between the phases of a microbatch: the values sent over each boundary, and the values that a stage saves.

Contract: `Traffic.carry` has the only rule for routes (see `cut_stages.py`). Saved bytes count each memory once, without memory
of parameters, inputs and step-invariant values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.joint_graph import JointGraph, is_tensor, tensor_meta
from graphpp.passes.graph.stage_graphs import B, F, PhaseKey
from graphpp.runtime import program
from graphpp.runtime.program import Boundary, InputRole, TensorMeta


def home_phase(node: fx.Node) -> PhaseKey | None:
    """The phase that computes a node; None for a placeholder or a value without a stage, which any phase can have."""
    stage = node.meta["stage"]
    return None if stage is None else (B if node.meta["backward"] else F, stage)


@dataclass
class Traffic:
    """By stage: the values that F sends forward, that F saves, and that B sends backward."""

    forward: dict[int, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))
    saved: dict[int, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))
    backward: dict[int, set[fx.Node]] = field(default_factory=lambda: defaultdict(set))

    def carry(self, value: fx.Node, source: PhaseKey, target: PhaseKey) -> None:
        (phase, stage), (end_phase, end) = source, target
        if phase is F:
            for hop in range(stage, end):
                self.forward[hop].add(value)
            if end_phase is F:
                return
            stage = max(stage, end)
            self.saved[stage].add(value)
        for hop in range(stage, end, -1):
            self.backward[hop].add(value)

    def arriving(self, key: PhaseKey) -> dict[fx.Node, InputRole]:
        phase, stage = key
        received = self.forward[stage - 1] if phase is F else self.backward[stage + 1]
        roles: dict[fx.Node, InputRole] = {value: program.Received(value.name) for value in received}
        return roles | {value: program.Saved(value.name) for value in (self.saved[stage] if phase is B else ())}

    def leaving(self, key: PhaseKey) -> list[tuple[type[program.Sent | program.Saved], set[fx.Node]]]:
        phase, stage = key
        if phase is F:
            return [(program.Sent, self.forward[stage]), (program.Saved, self.saved[stage])]
        return [(program.Sent, self.backward[stage])]


def boundaries(traffic: Traffic, order: dict[fx.Node, int], joint: JointGraph, stages: int) -> tuple[Boundary, ...]:
    needs_grad = _needing_grad(joint)

    def metas(values: set[fx.Node]) -> tuple[TensorMeta, ...]:
        ordered = sorted(values, key=order.__getitem__)
        return tuple(replace(tensor_meta(node), requires_grad=node in needs_grad) for node in ordered)

    return tuple(
        Boundary(stage, metas(traffic.forward[stage]), metas(traffic.backward[stage + 1]))
        for stage in range(stages - 1)
    )


def _needing_grad(joint: JointGraph) -> set[fx.Node]:
    needing: set[fx.Node] = set()
    for node in joint.graph.nodes:
        role = node.meta.get("role")
        trainable = isinstance(role, program.Parameter) and joint.parameters[role.fqn].requires_grad
        depends = trainable or any(source in needing for source in node.all_input_nodes)
        if depends and not node.meta["backward"] and _may_have_grad(node.meta.get("val")):
            needing.add(node)
    return needing


def _may_have_grad(value: object) -> bool:
    """Whether a value can require grad: a floating or complex tensor, or a tuple, which may contain one."""
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return isinstance(value, tuple | list)


def saved_values(
    traffic: Traffic, order: dict[fx.Node, int], stages: int
) -> tuple[tuple[tuple[TensorMeta, ...], ...], tuple[tuple[TensorMeta, ...], ...]]:
    """Per stage, the values that its forward saves for its backward, in the order of the joint graph; and their memory."""
    values = [sorted(traffic.saved[stage], key=order.__getitem__) for stage in range(stages)]
    return tuple(tuple(map(tensor_meta, each)) for each in values), tuple(map(memory_of, values))


def memory_of(values: Iterable[fx.Node]) -> tuple[TensorMeta, ...]:
    """The values whose memory is kept alive, each once; memory of parameters, inputs and step-invariant values is free."""
    memories = dict.fromkeys(_memory(value) for value in values)
    own = (node for node in memories if node.op != "placeholder" and not node.meta.get("step_invariant"))
    return tuple(tensor_meta(node) for node in own if is_tensor(node))


def _memory(value: fx.Node) -> fx.Node:
    """The node of the same phase that allocated a value's memory; a value received from another phase has its own memory."""
    node = value
    while shares_memory(node) and home_phase(node.all_input_nodes[0]) in (home_phase(value), None):
        node = node.all_input_nodes[0]
    return node
