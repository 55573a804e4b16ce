"""TODO contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphpp.runtime.program import Boundary, InputRole, OutputRole, Phase, TensorMeta

GraphResults = list[tuple[OutputRole, fx.Node]]


@dataclass(frozen=True)
class PhaseGraph:
    """One phase of one stage as a graph of its own; its placeholders and results stand in the order of the roles."""

    stage: int
    phase: Phase
    graph: fx.Graph
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]


@dataclass
class StagedGraphs:
    """The result of `cut_stages`: graphs by slot, boundaries, and per stage the values saved per microbatch and their bytes.

    `kept_bytes`: what is alive between I and W, where `split_weight_grad` has made them; else nothing. `fused`: backwards
    hand out the factors of their gradients (`fuse_grad_accumulation`). `prepared`: by stage, what is made once per step
    (`hoist_per_step`).
    """

    graphs: dict[PhaseKey, PhaseGraph]
    boundaries: tuple[Boundary, ...]
    saved: tuple[tuple[TensorMeta, ...], ...]
    saved_bytes: tuple[int, ...]
    kept_bytes: tuple[int, ...] = ()
    fused: bool = False
    hoisted: Mapping[int, PhaseGraph] = field(default_factory=dict)


def phase_graph(
    slot: PhaseKey, inputs: Mapping[fx.Node, InputRole], computed: Iterable[fx.Node], outputs: GraphResults
) -> PhaseGraph:
    """A graph of its own from copies: `inputs` become placeholders with their roles, `computed` follow in order."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node, role in inputs.items():
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {**node.meta, "role": role}
    for node in computed:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    end = graph.output(tuple(copies[node] for _, node in outputs))
    end.meta["roles"] = [role for role, _ in outputs]
    graph.lint()
    return PhaseGraph(slot[1], slot[0], graph, tuple(inputs.values()), tuple(role for role, _ in outputs))


PhaseKey = tuple[Phase, int]


F = Phase.FORWARD


B = Phase.BACKWARD
