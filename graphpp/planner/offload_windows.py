"""When each offloaded value of a table is copied away and back: the one policy of pipelines that run and of predictions.

Contract
    in   a table; for each stage and microbatch the bytes that it saves and the values that may leave, the largest first; the
         fraction of the bytes that leaves, and the actions by which a value comes back ahead of its first read
    out  the offload windows of all ranks. Of each stage and microbatch values leave in their order until the fraction is
         reached. A value stays if its backward comes before the device's memory would have been free for at least one action
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule


class Leaving(NamedTuple):
    """A value that may be offloaded. `readers`: the kinds of backward that read it, in the order B, I, W."""

    name: str
    nbytes: int
    readers: tuple[Kind, ...]


class SavedValues(NamedTuple):
    """The bytes that a stage saves for a microbatch, and the values that may leave, in the order in which they do."""

    nbytes: int
    values: Sequence[Leaving]


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


def windows_of(
    schedule: Schedule, fraction: float, ahead: int, saved: Callable[[int, int], SavedValues]
) -> Iterator[OffloadWindow]:
    """The offload windows of all ranks; `saved(stage, microbatch)`: equal objects serve equal microbatches soonest."""
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
                yield OffloadWindow(
                    stage,
                    microbatch,
                    tuple(value.name for value in values),
                    sum(value.nbytes for value in values),
                    evict_after=row.actions[forward + 1],
                    prefetch_at=row.actions[row.place[reader] - ahead],
                    first_use=reader,
                )


_BACKWARDS = (Kind.B, Kind.I, Kind.W)


def _leaving(
    budget: float, values: Sequence[Leaving], there: Sequence[Kind], late: frozenset[Kind]
) -> Mapping[Kind, Sequence[Leaving]]:
    """By the kind of the action that reads them first, the values that leave; `late`: the kinds that come late enough."""
    leaving: dict[Kind, list[Leaving]] = {}
    for value in values:
        if budget <= 0:
            break
        reader = next((kind for kind in value.readers if kind in there), None)
        if reader in late:
            leaving.setdefault(reader, []).append(value)
            budget -= value.nbytes
    return leaving
