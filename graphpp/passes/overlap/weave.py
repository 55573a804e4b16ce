"""Weave: the phases of several stages, for different microbatches, as one program, operation by operation.

Contract
--------
- The parts do not depend on each other. The woven graph's inputs are those of the parts, one part after the other, and so
  are its results, in the parts' own order. Every node has `meta["part"]`, and the letters and number of its part stand in
  front of its name.
- Each operation of each part stands in it once, after what it reads, and the collectives of a part in their order; what an
  operation computes is as it was, so that results are bit-equal to those of the parts one after the other.
- The order is that of `list_schedule`: the collectives of one part run while another part computes. Where no part has a
  collective there is nothing to hide, and the parts stand one after the other.
- The collectives of all parts together are issued in one order, which every rank of their groups must share: so it
  depends on the graphs and the costs alone. `collective_order` spells it, to be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from graphpp.passes.graph.collectives import group_of, is_collective
from graphpp.passes.graph.op_costs import Cost
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.passes.overlap.list_schedule import list_schedule
from graphpp.passes.overlap.stream_timing import TimeEstimate
from graphpp.passes.text.naming import format_value


@dataclass(frozen=True)
class WovenPart:
    """One of the programs in a woven one: `stage 0 backward`, and what stands in front of its names: `b0`."""

    title: str
    prefix: str


@dataclass(frozen=True)
class WovenGraph:
    """The woven graph, its parts, and what it costs woven and with the parts one after the other."""

    parts: tuple[PhaseGraph, ...]
    graph: fx.Graph
    woven: TimeEstimate
    sequence: TimeEstimate

    @property
    def title(self) -> str:
        """`stage 0 forward with stage 3 backward`."""
        return " with ".join(part.title for part in name_parts(self.parts))


def weave(parts: Sequence[PhaseGraph], cost: Cost) -> WovenGraph:
    """One graph of all parts' operations, ordered so that collectives hide under computing; `cost` gives seconds."""
    graph = concatenate(parts)
    found = list_schedule(graph, cost)
    end = graph.output_node()
    for node in found.order:
        end.prepend(node)
    _check(parts, graph)
    return WovenGraph(tuple(parts), graph, found.estimate, found.given)


def concatenate(parts: Sequence[PhaseGraph]) -> fx.Graph:
    """One graph of all parts' operations, part after part."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for op in ("placeholder", "compute"):
        for part, slot in zip(name_parts(parts), parts, strict=True):
            for node in slot.graph.nodes:
                if node.op == op or (op == "compute" and node.op not in ("placeholder", "output")):
                    known[node] = _copy(graph, node, known, part)
    ends = [slot.graph.output_node() for slot in parts]
    end = graph.output(tuple(known[node] for old in ends for node in old.args[0]))  # type: ignore[union-attr,index]
    end.meta["roles"] = [role for old in ends for role in old.meta["roles"]]
    graph.lint()
    return graph


def collective_order(graph: fx.Graph) -> dict[str, list[str]]:
    """By process group, the collectives in the order in which they are issued: operator, value."""
    found: dict[str, list[str]] = {}
    for node in filter(is_collective, graph.nodes):
        found.setdefault(group_of(node), []).append(f"{node.target} {format_value(node.meta['val'])}")
    return found


def name_parts(slots: Sequence[PhaseGraph]) -> list[WovenPart]:
    """A name for each part; parts of one stage and phase are told apart by a letter."""
    count = Counter[tuple[object, int]]()
    found = []
    for slot in slots:
        again = count[slot.phase, slot.stage]
        count[slot.phase, slot.stage] += 1
        letter = chr(ord("a") + again) if again else ""
        title = f"stage {slot.stage} {slot.phase.label.replace('_', ' ')}"
        found.append(WovenPart(f"{title} {letter}".rstrip(), f"{slot.phase.value.lower()}{slot.stage}{letter}"))
    return found


def _copy(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node], part: WovenPart) -> fx.Node:
    name = f"{part.prefix}_{node.name}"
    args, kwargs = fx.node.map_arg(node.args, known.__getitem__), fx.node.map_arg(node.kwargs, known.__getitem__)
    copy = graph.create_node(node.op, name if node.op == "placeholder" else node.target, args, kwargs, name)
    copy.meta = {**node.meta, "part": part}
    if node.op == "get_attr" and "held" not in copy.meta:
        raise TypeError(f"{node.format_node()} is held by no placeholder and by no node")
    return copy


def _check(parts: Sequence[PhaseGraph], graph: fx.Graph) -> None:
    """Each operation once, after its inputs; the collectives of each part in their order."""
    graph.lint()  # every input stands before its reader
    for part, slot in zip(name_parts(parts), parts, strict=True):
        given = [(f"{part.prefix}_{node.name}", node.target) for node in slot.graph.nodes if _computes(node)]
        found = [(node.name, node.target) for node in graph.nodes if _computes(node) and node.meta["part"] == part]
        assert sorted(map(str, given)) == sorted(map(str, found)), f"{part.title}: operations are lost or doubled"
        issued = [node.name for node in graph.nodes if is_collective(node) and node.meta["part"] == part]
        ordered = [f"{part.prefix}_{node.name}" for node in slot.graph.nodes if is_collective(node)]
        assert issued == ordered, f"{part.title}: collectives changed their order"


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "output")
