"""The copies of offloaded values between a device and the host, beside the computations of a table.

Contract
    in    offload windows; the computing actions of all ranks in an order in which they can run; the seconds of a copy
    out   `HostCopies`: for each action what it starts and what it waits for. `before` and `after` are called for each action,
          and move the time at which the rank goes on

All copies of a rank run one after the other on a line of their own, in the order in which the rank starts them, as on one CUDA
stream. An eviction starts when the forward has ended, and the rank waits for its end behind `evict_after`: only then is the
memory free. A prefetch starts with `prefetch_at`, and the rank waits for its end before `first_use`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow

_ByAction = Mapping[Action, Sequence[int]]


class HostCopies:
    """The copies of one step. `seconds`: of the copies of a window in one direction."""

    def __init__(self, windows: Iterable[OffloadWindow], seconds: Callable[[OffloadWindow], float]) -> None:
        self._windows = list(windows)
        self._seconds = [seconds(window) for window in self._windows]
        self._ends = [0.0] * len(self._windows)
        self._line: dict[int, float] = defaultdict(float)
        self._evicted = self._by(lambda window: Action(window.stage, Kind.F, window.microbatch))
        self._freed = self._by(lambda window: window.evict_after)
        self._prefetched = self._by(lambda window: window.prefetch_at)
        self._read = self._by(lambda window: window.first_use)

    def _by(self, action_of: Callable[[OffloadWindow], Action]) -> _ByAction:
        found: dict[Action, list[int]] = defaultdict(list)
        for at, window in enumerate(self._windows):
            found[action_of(window)].append(at)
        return dict(found)

    def before(self, rank: int, action: Action, now: float) -> float:
        """The time at which an action can start whose rank and other values are ready by now."""
        for at in self._prefetched.get(action, ()):
            self._copy(rank, at, now)
        return self._after_copies(now, [at for leaf in action.leaves for at in self._read.get(leaf, ())])

    def after(self, rank: int, action: Action, now: float) -> float:
        """The time at which the rank goes on behind an action that ends now."""
        now = self._after_copies(now, self._freed.get(action, ()))
        for leaf in action.leaves:
            for at in self._evicted.get(leaf, ()):
                self._copy(rank, at, now)
        return now

    def _copy(self, rank: int, at: int, now: float) -> None:
        self._line[rank] = self._ends[at] = max(self._line[rank], now) + self._seconds[at]

    def _after_copies(self, now: float, waited: Iterable[int]) -> float:
        return max([now, *(self._ends[at] for at in waited)])
