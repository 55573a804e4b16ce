"""The saved values that wait for their backward in the host's memory, and when each is copied away and back.

Contract
    in   an `Offload` option; a table, the programs of its microbatches and the graphs that the programs were emitted from
    out  the offload windows of all ranks. Of each stage and microbatch the largest values leave first, until the fraction is
         reached. A value stays if an operation needs it on the device meanwhile (`passes/graph/offloadable.py`), or if its
         backward comes before the device's memory would have been free for at least one action
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from graphpp._torch.symbols import Values, considering
from graphpp.options.offload import Offload
from graphpp.passes.graph.offloadable import LocalNeighbours, Offloadable, offloadable
from graphpp.runtime.program import Phase, PipelineProgram, Program, Saved, StageProgram
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

GraphOf = Callable[[Program], fx.Graph]

_BACKWARDS = (Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class _Row:
    """The computing actions of one rank, and where each part of them stands."""

    actions: Sequence[Action]
    place: Mapping[Action, int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Sequence[Action | None]) -> _Row:
        actions = [action for action in row if action is not None and action.is_compute]
        return cls(actions, {leaf: at for at, action in enumerate(actions) for leaf in action.leaves})

    def forwards(self) -> list[tuple[int, int]]:
        """(stage, microbatch) of each forward, in order."""
        return [(leaf.stage, leaf.microbatch or 0) for leaf in self.place if leaf.kind is Kind.F]


def choose_windows(
    choice: Offload, schedule: Schedule, programs: Sequence[PipelineProgram], graph_of: GraphOf
) -> tuple[OffloadWindow, ...]:
    """The offload windows of all ranks under a table, with or without communication; `programs`: one per microbatch.

    A stage's values are examined once for all microbatches that share its programs.
    """
    known: dict[int, list[_Candidate]] = {}

    def candidates(microbatch: int, index: int) -> list[_Candidate]:
        pipeline = programs[microbatch]
        stage = pipeline.stages[index]
        if id(stage) not in known:
            with considering(pipeline.values):
                known[id(stage)] = _candidates(choice, stage, _local_neighbours(schedule, index), graph_of, pipeline.values)
        return known[id(stage)]

    return tuple(
        window
        for row in map(_Row.of, schedule.table)
        for stage, microbatch in row.forwards()
        for window in _windows(choice, row, microbatch, programs[microbatch].stages[stage], candidates(microbatch, stage))
    )


class _Candidate(NamedTuple):
    """A value that may be offloaded, and the kinds of backward that read it."""

    value: Offloadable
    readers: tuple[Kind, ...]


def _candidates(
    choice: Offload, stage: StageProgram, beside: LocalNeighbours, graph_of: GraphOf, sizes: Values | None
) -> list[_Candidate]:
    """The values of a stage that `choice` offloads, the largest first; `sizes`: the numbers for symbolic sizes."""
    item = stage.programs.get(Phase.FORWARD)
    if item is None:
        return []
    found = offloadable(graph_of(item), beside)
    found = [each._replace(meta=each.meta.at(sizes)) for each in found] if sizes is not None else found
    values = [value for value in found if choice.wants(value.meta, value.nbytes)]
    inputs = {kind: set(stage.programs[Phase(kind.value)].inputs) for kind in _BACKWARDS if Phase(kind.value) in stage.programs}
    values.sort(key=lambda value: -value.nbytes)
    return [
        _Candidate(value, tuple(kind for kind, roles in inputs.items() if Saved(value.meta.name) in roles)) for value in values
    ]


def _local_neighbours(schedule: Schedule, stage: int) -> LocalNeighbours:
    rank_of = schedule.rank_of_stage
    return LocalNeighbours(rank_of.get(stage - 1) == rank_of[stage], rank_of.get(stage + 1) == rank_of[stage])


def _windows(
    choice: Offload,
    row: _Row,
    microbatch: int,
    stage: StageProgram,
    candidates: Sequence[_Candidate],
) -> Iterator[OffloadWindow]:
    """One window for each action that reads values first: B, or I, or W for the values that I does not read."""
    forward = row.place[Action(stage.index, Kind.F, microbatch)]
    budget = choice.fraction * stage.saved_bytes
    leaving: dict[Action, list[Offloadable]] = {}
    for value, readers in candidates:
        actions = (Action(stage.index, kind, microbatch) for kind in readers)
        reader = next((action for action in actions if action in row.place), None)
        if budget > 0 and reader is not None and row.place[reader] - choice.ahead > forward + 1:
            leaving.setdefault(reader, []).append(value)
            budget -= value.nbytes
    for reader, values in leaving.items():
        yield OffloadWindow(
            stage.index,
            microbatch,
            tuple(value.meta.name for value in values),
            sum(value.nbytes for value in values),
            evict_after=row.actions[forward + 1],
            prefetch_at=row.actions[row.place[reader] - choice.ahead],
            first_use=reader,
        )
