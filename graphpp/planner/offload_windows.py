"""The saved values that wait for their backward in host memory, and when each is evicted and prefetched.

Contract
    `windows_of`, for running pipelines and for predictions: of each stage and microbatch, values are offloaded in the given
    order until the fraction of the saved bytes is reached. A value stays if its backward is so early that the device memory
    would not be free for at least one action
    `choose_windows`, for programs and their graphs: the largest values are offloaded first. A value stays if an operation needs
    it on the device (`passes/graph/offloadable.py`), or if the option excludes it
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from graphpp._torch.symbols import Values, considering
from graphpp.options.offload import Offload
from graphpp.passes.graph.offloadable import LocalNeighbours, offloadable
from graphpp.runtime.program import Phase, PipelineProgram, Program, Saved, StageProgram
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

GraphOf = Callable[[Program], fx.Graph]

_BACKWARDS = (Kind.B, Kind.I, Kind.W)


class Leaving(NamedTuple):
    """A value that may be offloaded. `readers`: the kinds of backward that read it, in the order B, I, W."""

    name: str
    nbytes: int
    readers: tuple[Kind, ...]


class SavedValues(NamedTuple):
    """The bytes that a stage saves for a microbatch, and the values that may be offloaded, in that order."""

    nbytes: int
    values: Sequence[Leaving]


@dataclass(frozen=True)
class _Row:
    """One rank's computing actions, and the index of each part of them."""

    actions: Sequence[Action]
    place: Mapping[Action, int] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Sequence[Action | None]) -> _Row:
        actions = [action for action in row if action is not None and action.is_compute]
        return cls(actions, {leaf: at for at, action in enumerate(actions) for leaf in action.leaves})

    def forwards(self) -> list[tuple[int, int]]:
        """(stage, microbatch) of each forward, in order."""
        return [(leaf.stage, leaf.microbatch or 0) for leaf in self.place if leaf.kind is Kind.F]


def windows_of(
    schedule: Schedule, fraction: float, ahead: int, saved: Callable[[int, int], SavedValues]
) -> Iterator[OffloadWindow]:
    """The offload windows of all ranks. `saved(stage, microbatch)`: results are cached by the identity of its `values`."""
    chosen: dict[tuple[int, tuple[Kind, ...], frozenset[Kind]], Mapping[Kind, Sequence[Leaving]]] = {}
    for row in map(_Row.of, schedule.table):
        for stage, microbatch in row.forwards():
            own = saved(stage, microbatch)
            there = tuple(kind for kind in _BACKWARDS if Action(stage, kind, microbatch) in row.place)
            forward = row.place[Action(stage, Kind.F, microbatch)]
            late = frozenset(kind for kind in there if row.place[Action(stage, kind, microbatch)] - ahead > forward + 1)
            key = id(own.values), there, late
            if key not in chosen:
                chosen[key] = _leaving(fraction * own.nbytes, own.values, there, late)
            for kind, values in chosen[key].items():
                reader = Action(stage, kind, microbatch)
                names, nbytes = tuple(value.name for value in values), sum(value.nbytes for value in values)
                evict_after, prefetch_at = row.actions[forward + 1], row.actions[row.place[reader] - ahead]
                yield OffloadWindow(stage, microbatch, names, nbytes, evict_after, prefetch_at, first_use=reader)


def _leaving(
    budget: float, values: Sequence[Leaving], there: Sequence[Kind], late: frozenset[Kind]
) -> Mapping[Kind, Sequence[Leaving]]:
    """The offloaded values by the kind of their first reader; `late`: the kinds that run late enough."""
    leaving: dict[Kind, list[Leaving]] = {}
    for value in values:
        if budget <= 0:
            break
        reader = next((kind for kind in value.readers if kind in there), None)
        if reader in late:
            leaving.setdefault(reader, []).append(value)
            budget -= value.nbytes
    return leaving


# ---------------------------------------------------------------------------------- of a pipeline


def choose_windows(
    choice: Offload, schedule: Schedule, programs: Sequence[PipelineProgram], graph_of: GraphOf
) -> tuple[OffloadWindow, ...]:
    """The offload windows of all ranks, with or without communication in the table; `programs`: one per microbatch."""
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
    values = sorted((each for each in found if choice.wants(each.meta, each.nbytes)), key=lambda each: -each.nbytes)
    readers = [tuple(kind for kind, roles in inputs.items() if Saved(each.meta.name) in roles) for each in values]
    return [Leaving(each.meta.name, each.nbytes, own) for each, own in zip(values, readers, strict=True)]


def _local_neighbours(schedule: Schedule, stage: int) -> LocalNeighbours:
    rank_of = schedule.rank_of_stage
    return LocalNeighbours(rank_of.get(stage - 1) == rank_of[stage], rank_of.get(stage + 1) == rank_of[stage])
