"""The joint graph after the cut: one graph per phase and stage, and the values sent between them.

Contract: a `PhaseGraph` has its own nodes, with the names of the joint graph. Its placeholders have the roles of `inputs` as
`meta["role"]`, in order; its output node has `outputs` as `meta["roles"]`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import fx

from graphpp.runtime.program import Boundary, InputRole, LayerTraffic, OutputRole, Phase, TensorMeta

F = Phase.FORWARD
B = Phase.BACKWARD

PhaseKey = tuple[Phase, int]
GraphResults = list[tuple[OutputRole, fx.Node]]


@dataclass(frozen=True)
class PhaseGraph:
    """One phase of one stage as a graph. `layers`: its gathers and reductions (`stage/gather_layers.py`)."""

    stage: int
    phase: Phase
    graph: fx.Graph
    inputs: tuple[InputRole, ...]
    outputs: tuple[OutputRole, ...]
    layers: LayerTraffic | None = None


@dataclass
class StagedGraphs:
    """The result of `cut_stages`, refined by the passes after it.

    `graphs`: by phase and stage. `saved`: per stage, the values saved for the backward of one microbatch; `saved_memory`: the
    values that allocated their memory. `kept_memory`: per stage, the values that allocated the memory alive between I and W;
    empty without `split_weight_grad`. `unread_memory`: the part of `kept_memory` that I neither reads nor makes.
    `recomputed_memory`, `waiting_memory`: the same between R and B, where R is the first (`split_recompute`). `fused`:
    backwards pass the factors of gradients to the runtime (`fuse_grad_accumulation`). `hoisted`: per stage, the graph that
    computes the step-invariant values (`hoist_per_step`).
    """

    graphs: dict[PhaseKey, PhaseGraph]
    boundaries: tuple[Boundary, ...]
    saved: tuple[tuple[TensorMeta, ...], ...]
    saved_memory: tuple[tuple[TensorMeta, ...], ...]
    kept_memory: tuple[tuple[TensorMeta, ...], ...] = ()
    unread_memory: tuple[tuple[TensorMeta, ...], ...] = ()
    recomputed_memory: tuple[tuple[TensorMeta, ...], ...] = ()
    waiting_memory: tuple[tuple[TensorMeta, ...], ...] = ()
    fused: bool = False
    hoisted: Mapping[int, PhaseGraph] = field(default_factory=dict)


def phase_graph(
    key: PhaseKey, inputs: Mapping[fx.Node, InputRole], computed: Iterable[fx.Node], outputs: GraphResults
) -> PhaseGraph:
    """A phase graph made of copies: placeholders for `inputs`, with their roles, then `computed` in the given order."""
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
    return PhaseGraph(key[1], key[0], graph, tuple(inputs.values()), tuple(role for role, _ in outputs))
