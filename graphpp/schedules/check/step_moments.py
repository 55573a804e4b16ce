"""The peaks of many steps under one table: the table is read once, and the peaks of further costs take microseconds.

Contract
    in    the table that the ranks run; for each question the costs of its stages, and the state of each rank as whole stages
          or shards of them, or shards and single layers (`HeldBytes` without `waiting`)
    out   for each rank the bytes at its peak, and the most bytes of each kind: the numbers of `step_memory.step_peaks`

A moment of a rank is a time at which an action runs or has ended: how many microbatches of each of its stages are saved, or
wait for their W; what runs; which stages are whole, have gradients, or are in messages. A table of a thousand actions has some
dozens of different moments on each rank. Bytes of a moment are one product of integers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphpp.errors import ScheduleError
from graphpp.schedules.check.step_memory import CHANGING, IN_MESSAGES
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Row, Schedule
from graphpp.schedules.table.state_bytes import HeldBytes, LayerBytes, Layers

_RUNS = (Kind.F, Kind.B, Kind.I, Kind.W)
_PER_STAGE = 2 + len(_RUNS)  # entries of a moment for each stage: saved microbatches, waiting ones, those that run by kind

Integers = npt.NDArray[np.int64]


class RankPeak(NamedTuple):
    """`nbytes`: the most bytes at one time; `most`: of each kind, not all at the same time."""

    nbytes: int
    most: Mapping[str, int]


class StepMoments:
    """A table, read once."""

    def __init__(self, table: Schedule) -> None:
        self._stages, self._name = table.stages, table.name
        self._rows = [_RowMoments(row) for row in table.table]

    def peaks(self, costs: Costs, held: Sequence[HeldBytes]) -> tuple[RankPeak, ...]:
        """The peak of each rank. Raises `ScheduleError` for costs of another number of stages, and for other state."""
        if len(costs.stages) != self._stages or len(held) != len(self._rows):
            raise ScheduleError(
                f"{self._name!r} has {self._stages} stages on {len(self._rows)} ranks: give costs of as many stages, and the "
                f"bytes of as many ranks, got {len(costs.stages)} and {len(held)}"
            )
        return tuple(row.peak(costs.stages, own) for row, own in zip(self._rows, held, strict=True))


_Computations = tuple[tuple[int, Kind], ...]  # of one action: stages and kinds


class _State(NamedTuple):
    """The stages that are whole, those with gradients that are not reduced, and those that were reduced, the last one first.

    In a row that says nothing of whole stages, for computations that may gather single layers: `running`: what runs; `ran`:
    the different computations so far that may have reduced gradients, the last ones first.
    """

    whole: frozenset[int] = frozenset()
    unreduced: frozenset[int] = frozenset()
    sent: tuple[int, ...] = ()
    running: _Computations = ()
    ran: tuple[_Computations, ...] = ()


class _RowMoments:
    """The different moments of a rank: a row of `live` for each, and the number of its state in `states`."""

    def __init__(self, row: Row) -> None:
        actions = [action for action in row if action is not None]
        self.stages = sorted({leaf.stage for action in actions for leaf in action.leaves})
        self._at = {stage: _PER_STAGE * number for number, stage in enumerate(self.stages)}
        moments = list(self._moments(actions))
        found = dict.fromkeys(moments)
        self.last = moments[-1][1]
        self.states = list(dict.fromkeys(state for _, state in found))
        number = {state: at for at, state in enumerate(self.states)}
        self.live: Integers = np.array([live for live, _ in found], dtype=np.int64).reshape(len(found), -1)
        self.state: Integers = np.array([number[state] for _, state in found], dtype=np.int64)

    def _moments(self, actions: Sequence[Action]) -> Iterator[tuple[tuple[int, ...], _State]]:
        """The moments in order: before the row, while each action runs, and after it."""
        live, state = [0] * (_PER_STAGE * len(self.stages)), _State()
        followed = {(leaf.stage, leaf.microbatch) for each in actions for leaf in each.leaves if leaf.kind in (Kind.B, Kind.I)}
        layers = not any(action.kind is Kind.UNSHARD for action in actions)
        yield tuple(live), state
        for action in actions:
            if action.is_communication:
                continue
            computed = [leaf for leaf in action.leaves if action.is_compute]
            for leaf in action.leaves:
                state = _before(leaf, state)
            if layers and computed:
                state = _running(tuple((leaf.stage, leaf.kind) for leaf in computed), state)
            for leaf in computed:
                live[self._at[leaf.stage] + _TAKEN[leaf.kind]] -= leaf.kind is not Kind.F
                live[self._at[leaf.stage] + 2 + _RUNS.index(leaf.kind)] += 1
            yield tuple(live), state
            for leaf in computed:
                live[self._at[leaf.stage] + 2 + _RUNS.index(leaf.kind)] -= 1
                left = _LEFT.get(leaf.kind)
                if left is not None and (leaf.kind is not Kind.F or (leaf.stage, leaf.microbatch) in followed):
                    live[self._at[leaf.stage] + left] += 1
            if action.kind is Kind.RESHARD:
                state = state._replace(whole=state.whole - {action.stage})
            if state.running:
                state = state._replace(running=())
            yield tuple(live), state

    def peak(self, costs: Sequence[StageCosts], held: HeldBytes) -> RankPeak:
        """The peak for these costs."""
        if held.waiting:
            raise ScheduleError("held: gradients that wait are for step_peaks")
        nbytes = np.array([each for stage in self.stages for each in _bytes(costs[stage])], dtype=np.int64)
        activations = self.live @ nbytes if self.stages else np.zeros(len(self.live), dtype=np.int64)
        states = np.array([_state_bytes(state, held) for state in self.states], dtype=np.int64)
        end = sum(_state_bytes(self.last, held)) + held.at_end
        together = max(int((activations + states.sum(axis=1)[self.state]).max()), end)
        found = {**dict(zip(CHANGING, states.max(axis=0).tolist(), strict=True)), "activations": int(activations.max())}
        kinds = dict.fromkeys([*held.standing, *found])
        most = {kind: held.standing.get(kind, 0) + found.get(kind, 0) for kind in kinds}
        return RankPeak(sum(held.standing.values()) + together, most)


_TAKEN = {Kind.F: 0, Kind.B: 0, Kind.I: 0, Kind.W: 1}  # the entry of a stage from which a computation takes its microbatch
_LEFT = {Kind.F: 0, Kind.I: 1}  # the entry of a stage to which a computation leaves its microbatch


def _bytes(stage: StageCosts) -> tuple[int, ...]:
    """The bytes of each entry of a moment."""
    saved = stage.saved_bytes
    kept = saved if stage.kept_bytes is None else stage.kept_bytes
    own = {Kind.F: saved, Kind.B: saved, Kind.I: saved, Kind.W: kept}
    return saved, kept, *(max(own[kind], stage.peak_bytes.get(kind, 0)) for kind in _RUNS)


def _before(leaf: Action, state: _State) -> _State:
    """The state when an action starts."""
    if leaf.kind is Kind.UNSHARD:
        return state._replace(whole=state.whole | {leaf.stage})
    if leaf.kind in (Kind.B, Kind.W) and leaf.stage not in state.unreduced:
        return state._replace(unreduced=state.unreduced | {leaf.stage})
    if leaf.kind in (Kind.RESHARD, Kind.REDUCE_GRAD) and leaf.stage in state.unreduced:
        others = tuple(stage for stage in state.sent if stage != leaf.stage)
        return state._replace(unreduced=state.unreduced - {leaf.stage}, sent=(leaf.stage, *others))
    return state


def _running(computations: _Computations, state: _State) -> _State:
    """The state while these computations run."""
    if all(kind is Kind.F for _, kind in computations):
        return state._replace(running=computations)
    others = tuple(each for each in state.ran if each != computations)
    return state._replace(running=computations, ran=(computations, *others))


def _state_bytes(state: _State, held: HeldBytes) -> tuple[int, int, int]:
    """Whole parameters, whole gradients, messages."""
    if held.layers:
        return _layer_bytes(state, held.layers)
    whole = sum(nbytes for stages, nbytes in held.whole if not stages.isdisjoint(state.whole))
    gradients = sum(held.gradients.get(stage, 0) for stage in state.unreduced)
    stage = next((stage for stage in state.sent if stage in held.gradients), None)  # a stage without gradients sends nothing
    sent = 0 if stage is None else held.sent.get(stage, held.gradients[stage])
    return whole, gradients, IN_MESSAGES * sent


def _layer_bytes(state: _State, layers: Layers) -> tuple[int, int, int]:
    """The same where computations gather single layers: parts of one action run one after the other."""
    running = [layers.get(each, LayerBytes()) for each in state.running]
    sent = (max(layers.get(each, LayerBytes()).sent for each in computations) for computations in state.ran)
    whole, gradients = (max((getattr(each, name) for each in running), default=0) for name in ("whole", "gradients"))
    return whole, gradients, IN_MESSAGES * next(filter(None, sent), 0)
