"""Weave the phase graphs of several microbatches into one graph, operation by operation, to overlap their collectives.

Contract:
- The inputs of the woven graph are the inputs of the first part, then of the second, and so on; so are its results. Every node
  has `meta["part"]`, and its name has the part's prefix.
- Every operation of every part occurs once, after its inputs, and the collectives of a part keep their order. So results are
  bit-equal to running one part after the other.
- The order comes from `list_schedule`; without a collective the parts follow each other.
- Every rank of a process group must issue the group's collectives in the same order. So the order depends only on the graphs
  and the costs; ranks compare the text of `collective_order`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import fx

from graphpp._torch.symbols import hint
from graphpp.passes.graph.collectives import group_of, is_collective, is_started
from graphpp.passes.graph.joint_graph import results_of
from graphpp.passes.graph.liveness import live_bytes
from graphpp.passes.graph.op_costs import Cost
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.graph.stage_graphs import PhaseGraph, phase_graph
from graphpp.passes.overlap.list_schedule import list_schedule
from graphpp.passes.overlap.stream_timing import TimeEstimate
from graphpp.passes.stage.gather_layers import is_gather
from graphpp.passes.text.naming import format_value
from graphpp.passes.text.render import render
from graphpp.runtime.program import Program, WovenProgram


@dataclass(frozen=True)
class WovenPart:
    """The name of one part: its title, `stage 0 backward`, and the prefix of its node names, `b0`."""

    title: str
    prefix: str


@dataclass(frozen=True)
class WovenGraph:
    """The woven graph, its parts, and two time estimates: woven, and one part after the other."""

    parts: tuple[PhaseGraph, ...]
    graph: fx.Graph
    woven: TimeEstimate
    sequence: TimeEstimate

    @property
    def title(self) -> str:
        """`stage 0 forward with stage 3 backward`."""
        return " with ".join(part.title for part in name_parts(self.parts))


def weave(parts: Sequence[PhaseGraph], cost: Cost) -> WovenGraph:
    """One graph of all parts' operations, ordered so that computation hides collectives; `cost` gives seconds per node."""
    graph = concatenate(parts)
    order, woven, sequence = list_schedule(graph, cost)
    end = graph.output_node()
    for node in order:
        end.prepend(node)
    _check(parts, graph)
    return WovenGraph(tuple(parts), graph, woven, sequence)


def reordered(source: PhaseGraph, cost: Cost) -> WovenGraph | None:
    """One program's operations, ordered so that they hide its own collectives; None if no such order is faster.
    By the scheduler's clock, the order never needs more memory than the given one; without regions, in which `live_bytes` does
    not look, nor by the peak that the table was checked with."""
    if not any(map(is_started, source.graph.nodes)):
        return None
    order, best, given = list_schedule(source.graph, cost, keep_peak=True)
    if best.seconds >= given.seconds:
        return None
    inputs = {node: node.meta["role"] for node in source.graph.find_nodes(op="placeholder")}
    made = phase_graph((source.phase, source.stage), inputs, order, list(results_of(source.graph)))
    outlined = any(isinstance(node.target, RegionCall) for node in order)
    larger = not outlined and _most_live(made.graph) > _most_live(source.graph)
    return None if larger else WovenGraph((made,), made.graph, best, given)


def _most_live(graph: fx.Graph) -> int:
    return max(accumulate(map(hint, live_bytes(graph))), default=0)


def emit_woven(woven: WovenGraph, parts: Sequence[Program]) -> WovenProgram:
    """Render and load a woven graph; `parts` are the programs of its parts. Arguments and results are in order of the parts."""
    rendered = render(woven.graph, woven.title)
    return WovenProgram(tuple(parts), rendered.load(f"<graphpp {woven.title}>"), rendered.text)


def concatenate(parts: Sequence[PhaseGraph]) -> fx.Graph:
    graph = fx.Graph()
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in parts]  # by part, for two parts may be one graph
    for op in ("placeholder", "compute"):
        for part, source, own in zip(name_parts(parts), parts, copies, strict=True):
            for node in source.graph.nodes:
                if node.op == op or (op == "compute" and node.op not in ("placeholder", "output")):
                    own[node] = _copy(graph, node, own, part)
    ends = [part.graph.output_node() for part in parts]
    results = [own[node] for own, old in zip(copies, ends, strict=True) for node in old.args[0]]  # type: ignore[union-attr,index]
    end = graph.output(tuple(results))
    end.meta["roles"] = [role for old in ends for role in old.meta["roles"]]
    graph.lint()
    return graph


def collective_order(graph: fx.Graph) -> dict[str, list[str]]:
    """By process group, the collectives in the order of issue, each as text: operator, dtype and shape of the result.

    Gathers of sharded parameters are left out: all ranks of `dp_shard` run them for the same layers in any case.
    """
    found: dict[str, list[str]] = {}
    for node in (each for each in graph.nodes if is_collective(each) and not is_gather(each)):
        found.setdefault(group_of(node), []).append(f"{node.target} {format_value(node.meta['val'])}")
    return found


def name_parts(parts: Sequence[PhaseGraph]) -> list[WovenPart]:
    """A name for each part; repetitions of a stage and phase get the letters b, c, ..."""
    count = Counter[tuple[object, int]]()
    names = []
    for part in parts:
        repetition = count[part.phase, part.stage]
        count[part.phase, part.stage] += 1
        letter = chr(ord("a") + repetition) if repetition else ""
        title = f"stage {part.stage} {part.phase.label.replace('_', ' ')}"
        names.append(WovenPart(f"{title} {letter}".rstrip(), f"{part.phase.value.lower()}{part.stage}{letter}"))
    return names


def _copy(graph: fx.Graph, node: fx.Node, copies: dict[fx.Node, fx.Node], part: WovenPart) -> fx.Node:
    name = f"{part.prefix}_{node.name}"
    args, kwargs = fx.node.map_arg(node.args, copies.__getitem__), fx.node.map_arg(node.kwargs, copies.__getitem__)
    copy = graph.create_node(node.op, name if node.op == "placeholder" else node.target, args, kwargs, name)
    copy.meta = {**node.meta, "part": part}
    if node.op == "get_attr" and "held" not in copy.meta:
        raise TypeError(f"{node.format_node()} names an attribute of a module, and the woven graph has none")
    return copy


def _check(parts: Sequence[PhaseGraph], graph: fx.Graph) -> None:
    graph.lint()  # checks that every input comes before its reader
    for name, part in zip(name_parts(parts), parts, strict=True):
        expected = [(f"{name.prefix}_{node.name}", node.target) for node in part.graph.nodes if _computes(node)]
        found = [(node.name, node.target) for node in graph.nodes if _computes(node) and node.meta["part"] == name]
        assert sorted(map(str, expected)) == sorted(map(str, found)), f"{name.title}: operations are lost or doubled"
        issued = [node.name for node in graph.nodes if is_collective(node) and node.meta["part"] == name]
        ordered = [f"{name.prefix}_{node.name}" for node in part.graph.nodes if is_collective(node)]
        assert issued == ordered, f"{name.title}: collectives changed their order"


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")
