"""TODO contract."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphpp.passes.graph.stage_graphs import Cut, F, SlotGraph
from graphpp.passes.lower import Hook, Passed
from graphpp.runtime.program import Phase, PipelineProgram, Program


@dataclass
class Sources:
    """The graphs that programs were emitted from."""

    _slots: dict[int, tuple[Program, SlotGraph]] = field(default_factory=dict)

    @classmethod
    def joined(cls, several: Iterable[Sources]) -> Sources:
        """All graphs of several."""
        return cls({key: pair for each in several for key, pair in each._slots.items()})

    def hook(self) -> Hook:
        """What the recipe calls after each pass: the last pieces before programs are emitted are what those come from."""
        pieces: list[Cut] = []

        def hook(passed: Passed) -> None:
            if isinstance(passed.result, Cut):
                pieces.append(passed.result)
            elif isinstance(passed.result, PipelineProgram):
                self._add(pieces[-1], passed.result)

        return hook

    def _add(self, pieces: Cut, emitted: PipelineProgram) -> None:
        for stage in emitted.stages:
            for phase, item in stage.programs.items():
                self.add(item, pieces.slots[F if phase is Phase.EVALUATE else phase, stage.index])

    def add(self, item: Program, slot: SlotGraph) -> None:
        """Remember the graph that a program was made from."""
        self._slots[id(item)] = (item, slot)  # holding the program keeps its id its own

    def of(self, item: Program) -> SlotGraph:
        """The graph of one program."""
        return self._slots[id(item)][1]
