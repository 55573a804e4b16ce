"""What `offload=` says: which saved values wait for their backward in the host's memory; and their offload windows.

Contract
    in   None, a fraction of the saved bytes, True, a function of a `TensorMeta`, or an `Offload`; a table, the programs of
         its microbatches and the graphs they came from
    out  the offload windows of all ranks: of each stage and microbatch the largest values first, until the fraction is
    reached; none
         that is needed on the device meanwhile (`passes/graph/offloadable.py`), and none whose backward comes too early for the
         device's memory to be free for at least one action
    Raises `GraphPPError` for anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite

from torch import fx

from graphpp.errors import GraphPPError
from graphpp.passes.graph.offloadable import Beside, Movable, movable
from graphpp.runtime.program import Phase, PipelineProgram, Program, Saved, StageProgram, TensorMeta
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

GraphOf = Callable[[Program], fx.Graph]


@dataclass(frozen=True)
class Offload:
    """Which values leave the device between forward and backward.

    `fraction`: of the bytes that a stage saves for a microbatch, 0 to 1: the largest values leave first, until so much is
    away. `values`: a function that says which values may leave; None: those of at least `least_bytes`, for which the copy
    takes longer than starting it. `ahead`: how many computing actions before it is read a value starts to come back.
    """

    fraction: float = 1.0
    values: Callable[[TensorMeta], bool] | None = None
    least_bytes: int = 1 << 16
    ahead: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.fraction, bool) or not isfinite(self.fraction) or not 0 <= self.fraction <= 1:
            raise GraphPPError(f"offload= takes a fraction of the saved bytes from 0 to 1, got {self.fraction!r}")
        if not isinstance(self.ahead, int) or self.ahead < 1:
            raise GraphPPError(f"values come back at least one action ahead, got ahead={self.ahead!r}")

    def wants(self, value: Movable) -> bool:
        """Whether a value that may leave is to."""
        return value.nbytes >= self.least_bytes if self.values is None else bool(self.values(value.meta))


Given = Offload | float | bool | Callable[[TensorMeta], bool] | None


def chosen(given: Given) -> Offload | None:
    """What the caller of `graphpp.compile` chose. Raises `GraphPPError`."""
    if given is None or given is False:
        return None
    if isinstance(given, Offload):
        return given
    if given is True:
        return Offload()
    if isinstance(given, int | float):
        return Offload(fraction=given)
    if callable(given):
        return Offload(values=given)
    raise GraphPPError(
        f"offload={given!r}: take None, True, a fraction of the saved bytes, a function of a TensorMeta, or graphpp.Offload"
    )


def spelled(choice: Offload | None) -> str:
    """The choice as text that is the same on every rank."""
    if choice is None:
        return "None"
    which = f"from {choice.least_bytes} bytes" if choice.values is None else "by a function"
    return f"{choice.fraction} of the saved bytes, values {which}, {choice.ahead} actions ahead"


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


def offload_windows(
    choice: Offload, schedule: Schedule, programs: Sequence[PipelineProgram], graph_of: GraphOf
) -> tuple[OffloadWindow, ...]:
    """The offload windows of all ranks under a table, with or without communication; `programs`: one per microbatch."""
    known: dict[tuple[int, Beside], list[Movable]] = {}

    def candidates(stage: StageProgram) -> list[Movable]:
        item = stage.programs.get(Phase.FORWARD)
        if item is None:
            return []
        key = (id(item), _beside(schedule, stage.index))
        if key not in known:
            known[key] = [value for value in movable(graph_of(item), key[1]) if choice.wants(value)]
        return known[key]

    return tuple(
        window
        for row in map(_Row.of, schedule.table)
        for stage, microbatch in row.forwards()
        for window in _windows(choice, row, microbatch, programs[microbatch].stages[stage], candidates)
    )


def _beside(schedule: Schedule, stage: int) -> Beside:
    rank_of = schedule.rank_of_stage
    return Beside(rank_of.get(stage - 1) == rank_of[stage], rank_of.get(stage + 1) == rank_of[stage])


def _windows(
    choice: Offload,
    row: _Row,
    microbatch: int,
    stage: StageProgram,
    candidates: Callable[[StageProgram], list[Movable]],
) -> Iterator[OffloadWindow]:
    """One window for each action that reads values first: the whole backward; or I, and W what I does not read."""
    forward = row.place[Action(stage.index, Kind.F, microbatch)]
    budget = choice.fraction * stage.saved_bytes
    leaving: dict[Action, list[Movable]] = {}
    for value in sorted(candidates(stage), key=lambda value: -value.nbytes):
        reader = _reader(row, stage, microbatch, value.meta.name)
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


def _reader(row: _Row, stage: StageProgram, microbatch: int, name: str) -> Action | None:
    """The first action of the row that reads a saved value of a microbatch."""
    for kind in (Kind.B, Kind.I, Kind.W):
        action = Action(stage.index, kind, microbatch)
        if action in row.place and Saved(name) in stage.programs[Phase(kind.value)].inputs:
            return action
    return None
