"""The distinct moments of a rank's row: before it, while each action runs, and after it.

Contract
    in    a row of a table, and a `Reading`: all that lifetimes depend on beside the table
    out   `RowMoments`: what is alive at each distinct moment, and which moments each column has

Lifetimes are those of `live_values.py` and `rank_state.py`. Offloaded bytes are not alive from the end of a window's
`evict_after` to the start of its `prefetch_at`. A table of a thousand actions has some dozens of distinct moments on each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphpp.schedules.check.live_values import LiveValues
from graphpp.schedules.check.rank_state import RankState, State
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Row, Schedule

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reading:
    """All that lifetimes depend on beside the table.

    `costs_of`: by microbatch, the number of its costs among the distinct ones. `kept`: `MessageFlow.kept`. `woven`:
    `Costs.woven`. `layers`: whether computations gather single layers.
    """

    costs_of: Sequence[int]
    kept: int = 0
    woven: bool = True
    layers: bool = False
    offloaded: Sequence[OffloadWindow] = ()


class _Moment(NamedTuple):
    """How many values are alive, the state of the model, and the bytes that are offloaded."""

    live: tuple[int, ...]
    state: State
    away: int


class Column(NamedTuple):
    """The moments of a column by their numbers: while its action runs, one or several in order, and when it has ended."""

    during: tuple[int, ...]
    after: int


class RowMoments:
    """The distinct moments of a row; number 0 is before the row.

    `live`: [moments, entries], how many values are alive: `LiveValues.counts`, with `stages` and `messages`. `states`: the
    distinct states, `state`: which of them a moment has. `away`: the bytes that are offloaded.
    """

    def __init__(self, row: Row, table: Schedule, reading: Reading) -> None:
        walk = _Walk(row, table, reading)
        numbers = {walk.moment: 0}
        self.columns: list[Column] = []
        for action in row:
            during = tuple(numbers.setdefault(each, len(numbers)) for each in walk.run(action)) if action is not None else ()
            after = numbers.setdefault(walk.moment, len(numbers)) if during else self.last
            self.columns.append(Column(during or (after,), after))
        self.stages, self.messages, moments = walk.values.stages, walk.values.messages, list(numbers)
        self.states = list(dict.fromkeys(each.state for each in moments))
        number = {state: at for at, state in enumerate(self.states)}
        self.live: Integers = np.array([each.live for each in moments], dtype=np.int64)
        self.state: Integers = np.array([number[each.state] for each in moments], dtype=np.int64)
        self.away: Integers = np.array([each.away for each in moments], dtype=np.int64)

    @property
    def last(self) -> int:
        """The moment after the row."""
        return self.columns[-1].after if self.columns else 0


class _Walk:
    """A rank on its way along its row."""

    def __init__(self, row: Row, table: Schedule, reading: Reading) -> None:
        leaves = [leaf for action in row if action is not None for leaf in action.leaves]
        self.values = LiveValues(leaves, table, reading.costs_of, reading.kept)
        self._model, self._woven, self._away = RankState(layers=reading.layers), reading.woven, 0
        self._evicted, self._prefetched = _moved(reading.offloaded)

    @property
    def moment(self) -> _Moment:
        return _Moment(tuple(self.values.counts), self._model.state, self._away)

    def run(self, action: Action) -> Iterator[_Moment]:
        """The moments while an action runs; afterwards `moment` is the one when it has ended."""
        self._away -= self._prefetched.get(action, 0)
        together = self._woven or not action.is_compute
        for leaves in [action.leaves] if together else [(leaf,) for leaf in action.leaves]:
            for leaf in leaves:
                self.values.start(leaf)
                self._model.start(leaf)
            self._model.gather_layers(leaves)
            yield self.moment
            for leaf in leaves:
                self.values.end(leaf)
                self._model.end(leaf)
            self._model.gather_layers(())
        self._away += self._evicted.get(action, 0)


def _moved(offloaded: Sequence[OffloadWindow]) -> tuple[Mapping[Action, int], Mapping[Action, int]]:
    """The bytes evicted at the end of an action, and those prefetched at the start of one."""
    evicted, prefetched = Counter[Action](), Counter[Action]()
    for window in offloaded:
        evicted[window.evict_after] += window.nbytes
        prefetched[window.prefetch_at] += window.nbytes
    return evicted, prefetched
