"""Provenance: the phase graph from which each program was emitted.

Contract: `ProgramGraphs.hook()` watches one run of `lower` and records the last phase graph before `emit` of each program.
Compiled regions, woven programs and CUDA graphs start from these graphs. The key of a program is the `id` of its function,
which programs for other sizes share; the record keeps the program alive, so that no other object gets the `id`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from graphpp.passes.graph.stage_graphs import F, PhaseGraph, StagedGraphs
from graphpp.passes.lower import Hook, PassResult
from graphpp.runtime.program import Phase, PipelineProgram, Program


@dataclass
class _Source:
    """A program and its graph. `other`: the program in another order, once asked for; None if there is none."""

    program: Program
    graph: PhaseGraph
    other: tuple[Program, PhaseGraph] | None = None
    asked: bool = False


@dataclass
class ProgramGraphs:

    _graphs: dict[int, _Source] = field(default_factory=dict)

    @classmethod
    def joined(cls, several: Iterable[ProgramGraphs]) -> ProgramGraphs:
        return cls({key: source for each in several for key, source in each._graphs.items()})

    def hook(self) -> Hook:
        """A hook for `lower`: keeps the last staged graphs, and records them when the programs are emitted."""
        staged: list[StagedGraphs] = []

        def hook(passed: PassResult) -> None:
            if isinstance(passed.result, StagedGraphs):
                staged.append(passed.result)
            elif isinstance(passed.result, PipelineProgram):
                for stage in passed.result.stages:
                    for phase, item in stage.programs.items():
                        self.add(item, staged[-1].graphs[F if phase is Phase.EVALUATE else phase, stage.index])
                    if stage.hoisted is not None:
                        self.add(stage.hoisted, staged[-1].hoisted[stage.index])

        return hook

    def add(self, item: Program, graph: PhaseGraph) -> None:
        self._graphs[id(item.run)] = _Source(item, graph)

    def in_order(self, item: Program, order: Callable[[PhaseGraph], tuple[Program, PhaseGraph] | None]) -> Program | None:
        """The program that `order` makes of a program's graph, recorded too, or None. It is made once for all sizes."""
        source = self._graphs[id(item.run)]
        if not source.asked:
            source.other, source.asked = order(source.graph), True
        if source.other is None:
            return None
        self.add(*source.other)
        return source.other[0]

    def of(self, item: Program) -> PhaseGraph:
        """The phase graph of a program. Raises `KeyError` for a program that was not recorded."""
        return self._graphs[id(item.run)].graph
