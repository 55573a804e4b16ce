"""The saved values that wait for their backward in the host's memory, of the programs of a pipeline.

Contract
    in   an `Offload` option; a table, the programs of its microbatches and the graphs that the programs were emitted from
    out  the offload windows of all ranks (`offload_windows.py`), the largest values first. A value stays if an operation needs
         it on the device meanwhile (`passes/graph/offloadable.py`), or if the option does not want it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import fx

from graphpp._torch.symbols import Values, considering
from graphpp.options.offload import Offload
from graphpp.passes.graph.offloadable import LocalNeighbours, offloadable
from graphpp.planner.offload_windows import Leaving, SavedValues, windows_of
from graphpp.runtime.program import Phase, PipelineProgram, Program, Saved, StageProgram
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

GraphOf = Callable[[Program], fx.Graph]

_BACKWARDS = (Kind.B, Kind.I, Kind.W)


def choose_windows(
    choice: Offload, schedule: Schedule, programs: Sequence[PipelineProgram], graph_of: GraphOf
) -> tuple[OffloadWindow, ...]:
    """The offload windows of all ranks under a table, with or without communication; `programs`: one per microbatch.

    A stage's values are examined once for all microbatches that share its programs.
    """
    known: dict[int, SavedValues] = {}

    def saved(index: int, microbatch: int) -> SavedValues:
        pipeline = programs[microbatch]
        stage = pipeline.stages[index]
        if id(stage) not in known:
            with considering(pipeline.values):
                values = _values(choice, stage, _local_neighbours(schedule, index), graph_of, pipeline.values)
                known[id(stage)] = SavedValues(stage.saved_bytes, values)
        return known[id(stage)]

    return tuple(windows_of(schedule, choice.fraction, choice.ahead, saved))


def _values(
    choice: Offload, stage: StageProgram, beside: LocalNeighbours, graph_of: GraphOf, sizes: Values | None
) -> list[Leaving]:
    """The values of a stage that `choice` offloads, the largest first; `sizes`: the numbers for symbolic sizes."""
    item = stage.programs.get(Phase.FORWARD)
    if item is None:
        return []
    found = offloadable(graph_of(item), beside)
    found = [each._replace(meta=each.meta.at(sizes)) for each in found] if sizes is not None else found
    inputs = {kind: set(stage.programs[Phase(kind.value)].inputs) for kind in _BACKWARDS if Phase(kind.value) in stage.programs}
    values = [value for value in found if choice.wants(value.meta, value.nbytes)]
    return [
        Leaving(
            value.meta.name, value.nbytes, tuple(kind for kind, roles in inputs.items() if Saved(value.meta.name) in roles)
        )
        for value in sorted(values, key=lambda value: -value.nbytes)
    ]


def _local_neighbours(schedule: Schedule, stage: int) -> LocalNeighbours:
    rank_of = schedule.rank_of_stage
    return LocalNeighbours(rank_of.get(stage - 1) == rank_of[stage], rank_of.get(stage + 1) == rank_of[stage])
