"""The order of operations in one rank's programs and overlapped actions, and the collectives of its step.

A program of an action of its own hides the model's collectives under its own other operations, unless it gathers layers of
sharded parameters, whose gathers have their places. Parts of an action run one after the other, unwoven, if (a) none has a
collective, so that there is no wait to hide, (b) two are forwards of a stage that writes a buffer, since the second reads what
the first wrote, or (c) they gather layers of sharded parameters.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphpp.passes.graph.collectives import group_of, is_collective
from graphpp.passes.graph.op_costs import Cost
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.passes.overlap.weave import WovenGraph, collective_order, emit_woven, reordered, weave
from graphpp.passes.provenance import ProgramGraphs
from graphpp.passes.stage.emit import emit_reordered
from graphpp.passes.stage.gather_layers import is_gather
from graphpp.runtime.program import BufferUpdate, Phase, PipelineProgram, Program, StageProgram, WovenProgram
from graphpp.schedules.table.actions import Action

ProgramIds = tuple[int, ...]
WovenHook = Callable[[WovenGraph, Program | WovenProgram, float], None]  # (ordered graph, its program, seconds of ordering)


def unwatched(made: WovenGraph, emitted: Program | WovenProgram, seconds: float) -> None:
    pass


@dataclass(frozen=True)
class ProgramRow:
    """The actions of one rank, the stage programs of each microbatch, and the graphs of these programs."""

    actions: Iterable[Action | None]
    programs: Sequence[PipelineProgram]
    sources: ProgramGraphs

    def __iter__(self) -> Iterator[tuple[Action, tuple[Program, ...]]]:
        """The compute actions, each with the programs of its parts."""
        for action in self.actions:
            if action is not None and action.is_compute:
                yield action, tuple(map(self._program, action.leaves))

    def _program(self, leaf: Action) -> Program:
        assert leaf.microbatch is not None
        programs = self.programs[leaf.microbatch].stages[leaf.stage].programs
        return programs.get(Phase(leaf.kind.value)) or programs[Phase.EVALUATE]


def in_best_order(row: ProgramRow, cost: Cost, watch: WovenHook) -> ProgramRow:
    """The row with programs that hide their own collectives; its `sources` also have their graphs."""

    def order(item: Program, source: PhaseGraph) -> tuple[Program, PhaseGraph] | None:
        began = time.perf_counter()
        found = reordered(source, cost) if source.layers is None else None
        if found is None:
            return None
        program = emit_reordered(item, found.parts[0])
        watch(found, program, time.perf_counter() - began)
        return program, found.parts[0]

    alone = {id(parts[0].run): parts[0] for action, parts in row if not action.parts}
    made = {key: row.sources.in_order(item, partial(order, item)) or item for key, item in alone.items()}

    def exchanged(stage: StageProgram) -> StageProgram:
        pairs = [(phase, item, made.get(id(item.run), item)) for phase, item in stage.programs.items()]
        if all(new.run is item.run for _, item, new in pairs):
            return stage
        return replace(stage, programs={phase: replace(item, run=new.run, source=new.source) for phase, item, new in pairs})

    stages = {id(stage): exchanged(stage) for each in row.programs for stage in each.stages}
    whole = {id(each): replace(each, stages=tuple(stages[id(stage)] for stage in each.stages)) for each in row.programs}
    return replace(row, programs=[whole[id(each)] for each in row.programs])


def woven(row: ProgramRow, cost: Cost, watch: WovenHook) -> dict[ProgramIds, tuple[WovenGraph, WovenProgram]]:
    """Woven graphs and programs of a row, by the ids of their parts' programs; `cost`: seconds of an operation."""
    made: dict[ProgramIds, tuple[WovenGraph, WovenProgram]] = {}
    seen: set[ProgramIds] = set()
    for action, parts in row:
        key = tuple(map(id, parts))
        if not action.parts or key in seen:
            continue
        seen.add(key)
        graphs = [row.sources.of(part) for part in parts]
        if _worth_weaving(graphs):
            began = time.perf_counter()
            result = weave(graphs, cost)
            made[key] = (result, emit_woven(result, parts))
            watch(*made[key], time.perf_counter() - began)
    return made


def collectives_of(row: ProgramRow, made: Mapping[ProgramIds, tuple[WovenGraph, WovenProgram]]) -> dict[str, list[str]]:
    """By process group, the model's collectives of a step in the order in which this rank issues them."""
    found: dict[str, list[str]] = {}
    known: dict[ProgramIds, list[dict[str, list[str]]]] = {}
    for action, parts in row:
        key = tuple(map(id, parts))
        if key not in known:
            graphs = [made[key][0].graph] if key in made else [row.sources.of(part).graph for part in parts]
            known[key] = list(map(collective_order, graphs))
        for group, lines in (pair for each in known[key] for pair in each.items()):
            found.setdefault(group, []).extend(f"{action}: {line}" for line in lines)
    return found


def groups_of_model(row: ProgramRow) -> frozenset[str]:
    """The process groups of the model's own collectives; graphpp's gathers of sharded parameters do not count."""
    programs = {id(part.run): part for _, parts in row for part in parts}
    nodes = (node for part in programs.values() for node in row.sources.of(part).graph.nodes)
    return frozenset(group_of(node) for node in nodes if is_collective(node) and not is_gather(node))


def _worth_weaving(parts: Sequence[PhaseGraph]) -> bool:
    writers = Counter(part.stage for part in parts if any(isinstance(role, BufferUpdate) for role in part.outputs))
    if any(part.layers is not None for part in parts):  # gathering for two parts at once needs more memory
        return False
    return max(writers.values(), default=0) < 2 and any(is_collective(node) for part in parts for node in part.graph.nodes)
