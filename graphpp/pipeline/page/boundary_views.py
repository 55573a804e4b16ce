"""The values between the stages of a compiled graph: those of each boundary, and those that travel further (relays).

Contract
    in   the stage programs and boundaries of a compiled graph, the graphs from which the programs were emitted
    out  `BoundaryView` and `RelayView` for one microbatch. A value crosses several boundaries under one name, so a relay is a
         name on neighbouring boundaries. A stage only passes a relay on if none of its phases reads the value
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from graphpp.compiler.compile_graph import CompiledGraph
from graphpp.passes.graph.joint_graph import describe_node
from graphpp.passes.text.naming import format_dtype
from graphpp.report.page import BoundaryView, RelayView, ValueView
from graphpp.runtime.program import Boundary, Phase, Received, Saved, Sent, TensorMeta, total_bytes

_FORWARD, _BACKWARD = "forward", "backward"
_PHASES = {_FORWARD: (Phase.FORWARD, Phase.EVALUATE), _BACKWARD: (Phase.BACKWARD, Phase.INPUT_GRAD)}


def boundary_views(graph: CompiledGraph) -> tuple[tuple[BoundaryView, ...], tuple[RelayView, ...]]:
    """The boundaries, and the relays."""
    boundaries, makers = graph.program.boundaries, {node.name: node for node in graph.captured.joint.graph.nodes}
    relays = [relay for way in (_FORWARD, _BACKWARD) for relay in _relays(graph, way, makers)]
    further = {(relay.way, relay.value.name) for relay in relays}
    views = []
    for each in boundaries:
        relayed = [meta for way in (_FORWARD, _BACKWARD) for meta in _values(each, way) if (way, meta.name) in further]
        values = ([_view(meta, makers) for meta in _values(each, way)] for way in (_FORWARD, _BACKWARD))
        sizes = total_bytes(each.forward), total_bytes(each.backward), total_bytes(relayed)
        views.append(BoundaryView(each.stage, *sizes, *map(tuple, values)))
    return tuple(views), tuple(relays)


def _values(boundary: Boundary, way: str) -> Sequence[TensorMeta]:
    return boundary.forward if way == _FORWARD else boundary.backward


def _view(meta: TensorMeta, makers: Mapping[str, fx.Node]) -> ValueView:
    maker = describe_node(makers[meta.name]) if meta.name in makers else ""
    return ValueView(meta.name, meta.nbytes, f"{format_dtype(meta.dtype)}{list(meta.shape)}", maker)


def _relays(graph: CompiledGraph, way: str, makers: Mapping[str, fx.Node]) -> Iterator[RelayView]:
    crossed: dict[str, list[int]] = {}
    metas: dict[str, TensorMeta] = {}
    for boundary in graph.program.boundaries:
        for meta in _values(boundary, way):
            crossed.setdefault(meta.name, []).append(boundary.stage)
            metas[meta.name] = meta
    for name, stages in crossed.items():
        if len(stages) > 1:
            low, high = stages[0], stages[-1] + 1
            ends = (low, high) if way == _FORWARD else (high, low)
            unused = tuple(stage for stage in range(low + 1, high) if not _reads(graph, stage, name, way))
            yield RelayView(_view(metas[name], makers), *ends, way, unused)


def _reads(graph: CompiledGraph, stage: int, name: str, way: str) -> bool:
    """Whether a stage does anything with a value that it receives but send the value on."""
    for phase, item in graph.program.stages[stage].programs.items():
        for node in graph.sources.of(item).graph.nodes:
            if node.op == "placeholder" and node.meta["role"] in (Received(name), Saved(name)):
                passing = phase in _PHASES[way] and set(item.outputs) & {Sent(name)} and Saved(name) not in item.outputs
                if not passing or any(user.op != "output" for user in node.users):
                    return True
    return False
