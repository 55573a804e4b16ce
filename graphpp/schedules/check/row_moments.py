"""The distinct moments of a rank's row: before it, while each action runs, and after it.

Lifetimes are those of `lifetimes.py`. Offloaded bytes are not alive from the end of a window's `evict_after` to the start of
its `prefetch_at`. A table of a thousand actions has some dozens of distinct moments on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from graphpp.schedules.check.lifetimes import CHANGES_STATE, LiveValues, RankState, State
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Row, Schedule

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """The inputs of lifetimes other than the table: `MessageFlow.kept`, `Costs.woven`, offloaded values.

    `costs_of`: by microbatch, the number of its costs among the distinct ones. `layers`: computations gather single layers.
    """

    costs_of: Sequence[int]
    kept: int = 0
    woven: bool = True
    layers: bool = False
    offloaded: Sequence[OffloadWindow] = ()


Column = tuple[tuple[int, ...], int]
"""The moments of a column by their numbers: while its action runs, one or several in order, and when it has ended."""


class RowMoments:
    """The distinct moments of a row; number 0 is before the row.

    `live`: [moments, entries], how many values are alive: `LiveValues.counts`, with `stages` and `messages`. `states`: the
    distinct states, `state`: the number of each moment's state. `away`: the offloaded bytes. `ahead`: some microbatch has an R.
    """

    def __init__(self, row: Row, table: Schedule, reading: Reading) -> None:
        walk = _Walk(row, table, reading)
        self.columns: list[Column] = []
        for action in row:
            self.columns.append(walk.run(action) if action is not None else ((self.last,), self.last))
        self.stages, self.messages, self.states = walk.values.stages, walk.values.messages, list(walk.states)
        self.ahead = bool(table.recomputed_ahead)
        self.live: Integers = np.array(walk.live, dtype=np.int64)
        self.state: Integers = np.array([state for _, state, _ in walk.moments], dtype=np.int64)
        self.away: Integers = np.array([away for *_, away in walk.moments], dtype=np.int64)

    @cached_property
    def places(self) -> tuple[Integers, Integers]:
        """The columns and numbers of all moments in order, with repetitions; the moment before the row is in column 0."""
        columns, moments = [0], [0]
        for at, (during, after) in enumerate(self.columns):
            columns += [at] * (len(during) + 1)
            moments += (*during, after)
        return np.array(columns, dtype=np.int64), np.array(moments, dtype=np.int64)

    @property
    def last(self) -> int:
        """The moment after the row."""
        return self.columns[-1][1] if self.columns else 0


class _Walk:
    """A rank's walk along its row.

    `moments`: numbers by `LiveValues.key`, the number of the state and the offloaded bytes; `states`: distinct states. `live`:
    counts by moment.
    """

    def __init__(self, row: Row, table: Schedule, reading: Reading) -> None:
        leaves = [leaf for action in row if action is not None for leaf in action.leaves]
        self.values = LiveValues(leaves, table, reading.costs_of, reading.kept)
        self._model, self._woven, self._layers, self._away = RankState(), reading.woven, reading.layers, 0
        self._evicted, self._prefetched = _moved(reading.offloaded)
        self.moments: dict[tuple[int, int, int], int] = {}
        self.states: dict[State, int] = {}
        self.live: list[tuple[int, ...]] = []
        self._last = self._model.state, 0  # with its number
        self._number()

    def _number(self) -> int:
        state = self._model.state
        if state is not self._last[0] or not self.states:  # a hash of a state takes longer than this comparison
            self._last = state, self.states.setdefault(state, len(self.states))
        number = self.moments.setdefault((self.values.key, self._last[1], self._away), len(self.live))
        if number == len(self.live):
            self.live.append(tuple(self.values.counts))
        return number

    def run(self, action: Action) -> Column:
        """The moments while an action runs, and the moment when it has ended."""
        values, model, during = self.values, self._model, list[int]()
        self._away -= self._prefetched.get(action, 0)
        together = self._woven or not action.is_compute
        for leaves in [action.leaves] if together else [(leaf,) for leaf in action.leaves]:
            for leaf in leaves:
                values.start(leaf)
                if leaf.kind in CHANGES_STATE:
                    model.start(leaf)
            if self._layers:
                model.gather_layers(leaves)
            during.append(self._number())
            if first := [leaf for leaf in leaves if model.makes_sums(leaf)]:
                during.append(self._with_sums(first))
            for leaf in leaves:
                values.end(leaf)
                if leaf.kind in CHANGES_STATE:
                    model.end(leaf)
            if self._layers:
                model.gather_layers(())
        self._away += self._evicted.get(action, 0)
        return tuple(during), self._number()

    def _with_sums(self, first: Sequence[Action]) -> int:
        """The moment near the end of the first computations that make gradients: saved values are freed layer by layer."""
        for leaf in first:
            self._model.make_sums(leaf)
            self.values.count_as_read(leaf, -1)
        number = self._number()
        for leaf in first:
            self.values.count_as_read(leaf, 1)
        return number


def _moved(offloaded: Sequence[OffloadWindow]) -> tuple[Mapping[Action, int], Mapping[Action, int]]:
    """The bytes evicted at the end of an action, and prefetched at the start of one."""
    evicted, prefetched = Counter[Action](), Counter[Action]()
    for window in offloaded:
        evicted[window.evict_after] += window.nbytes
        prefetched[window.prefetch_at] += window.nbytes
    return evicted, prefetched
