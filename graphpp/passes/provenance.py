"""TODO contract."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphpp.passes.graph.stage_graphs import F, PhaseGraph, StagedGraphs
from graphpp.passes.lower import Hook, PassResult
from graphpp.runtime.program import Phase, PipelineProgram, Program


@dataclass
class ProgramGraphs:
    """The graphs that programs were emitted from."""

    _slots: dict[int, tuple[Program, PhaseGraph]] = field(default_factory=dict)

    @classmethod
    def joined(cls, several: Iterable[ProgramGraphs]) -> ProgramGraphs:
        """All graphs of several."""
        return cls({key: pair for each in several for key, pair in each._slots.items()})

    def hook(self) -> Hook:
        """What the recipe calls after each pass: the last staged before programs are emitted are what those come from."""
        staged: list[StagedGraphs] = []

        def hook(passed: PassResult) -> None:
            if isinstance(passed.result, StagedGraphs):
                staged.append(passed.result)
            elif isinstance(passed.result, PipelineProgram):
                self._add(staged[-1], passed.result)

        return hook

    def _add(self, staged: StagedGraphs, emitted: PipelineProgram) -> None:
        for stage in emitted.stages:
            for phase, item in stage.programs.items():
                self.add(item, staged.graphs[F if phase is Phase.EVALUATE else phase, stage.index])

    def add(self, item: Program, slot: PhaseGraph) -> None:
        """Remember the graph that a program was made from."""
        self._slots[id(item)] = (item, slot)  # holding the program keeps its id its own

    def of(self, item: Program) -> PhaseGraph:
        """The graph of one program."""
        return self._slots[id(item)][1]
