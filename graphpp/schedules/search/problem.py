"""The scheduler's problem in numbers: operations are integers, and their properties are tuples indexed by them.

Contract
    With S stages, M microbatches and N = S M, operation x = stage * M + microbatch is a forward, N + x its input gradients
    (or its whole backward, if a candidate says so), 2 N + x its weight gradients. Times are shares of the longest
    operation's time, so that one tolerance fits all problems. `reads[op]` is the operation whose result `op` needs, -1 for
    forwards of the first stage; `lag[op]` is the time from the end of that operation until its result is on the rank of
    `op`. A rank has `saved` bytes more from the start of a forward to the end of its backward; a split backward leaves
    `kept` bytes until the end of its weight gradients. A rank never has more than `cap` bytes alive.

The runner's overhead and messages that occupy ranks are part of an operation's time here. `simulate`, which compares the
few best tables at the end, places them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpp.schedules.table.costs import Costs


@dataclass(frozen=True)
class Problem:
    """The operations to be ordered. `home[stage]` is the stage's rank; times and lags are per operation, bytes per stage, caps
    per rank.
    """

    ranks: int
    stages: int
    microbatches: int
    home: tuple[int, ...]
    took: tuple[float, ...]
    whole: tuple[float, ...]
    """The time of a whole backward, per stage."""
    reads: tuple[int, ...]
    lag: tuple[float, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    cap: tuple[float, ...]
    count: int
    """N: the number of forwards."""
    unit: float
    """The longest operation's time, in the units of the costs."""

    @classmethod
    def of(cls, costs: Costs, home: Mapping[int, int], microbatches: int, cap: Sequence[float]) -> Problem:
        """The problem of ordering `microbatches` microbatches with stages placed as in `home`."""
        stages = len(costs.stages)
        homes = tuple(home[stage] for stage in range(stages))
        times, lags = _times(costs, homes), _lags(costs, homes)
        unit = max(map(max, times)) or 1.0
        times, lags = ([[time / unit for time in each] for each in listed] for listed in (times, lags))
        kept = [stage.saved_bytes if stage.kept_bytes is None else stage.kept_bytes for stage in costs.stages]
        spread = [value for per_stage in times[:3] for value in per_stage for _ in range(microbatches)]
        return cls(
            len(cap),
            stages,
            microbatches,
            homes,
            tuple(spread),
            tuple(times[3]),
            _reads(stages, microbatches),
            tuple(value for per_stage in lags for value in per_stage for _ in range(microbatches)),
            tuple(stage.saved_bytes for stage in costs.stages),
            tuple(kept),
            tuple(cap),
            stages * microbatches,
            unit,
        )

    def on(self, rank: int) -> list[int]:
        """The stages of a rank, ascending."""
        return [stage for stage in range(self.stages) if self.home[stage] == rank]

    def stage_times(self, stage: int) -> tuple[float, float, float]:
        """The times of a stage's forward, input gradients and weight gradients."""
        at = stage * self.microbatches
        return self.took[at], self.took[self.count + at], self.took[2 * self.count + at]

    def least(self, stage: int) -> float:
        """The least time for which a microbatch occupies a stage's rank."""
        forward, inputs, weights = self.stage_times(stage)
        return forward + min(inputs + weights, self.whole[stage])

    def period(self) -> float:
        """The time between microbatches if the busiest rank never waits."""
        return max(sum(map(self.least, self.on(rank))) for rank in range(self.ranks))

    def prefers_whole(self, stage: int) -> bool:
        """True if a whole backward has an advantage: less time, or fewer bytes."""
        _, inputs, weights = self.stage_times(stage)
        return self.whole[stage] < inputs + weights - 1e-9 or self.kept[stage] > self.saved[stage]

    def bound(self) -> float:
        """A lower bound of the makespan: a rank's work after its first input, or the whole path of one microbatch."""
        start, way = 0.0, 0.0
        heads: dict[int, float] = {}
        for stage in range(self.stages):
            at = stage * self.microbatches
            start += self.lag[at]
            heads.setdefault(self.home[stage], start)
            start += self.took[at]
            way += self.lag[self.count + at] + min(self.took[self.count + at], self.whole[stage])
        work = {rank: self.microbatches * sum(map(self.least, self.on(rank))) for rank in heads}
        last = self.least(0) - self.took[0] - min(self.took[self.count], self.whole[0])
        return max(start + way + last, *(heads[rank] + work[rank] for rank in heads))


def _times(costs: Costs, home: Sequence[int]) -> list[list[float]]:
    """Per stage: forward, input gradients, weight gradients, whole backward; each with the messages that occupy its rank."""
    forward, inputs = _occupied(costs, home)
    extra = costs.overhead
    return [
        [stage.forward + occupied + extra for stage, occupied in zip(costs.stages, forward, strict=True)],
        [stage.input_grad + occupied + extra for stage, occupied in zip(costs.stages, inputs, strict=True)],
        [stage.weight_grad + extra for stage in costs.stages],
        [
            (stage.input_grad + stage.weight_grad if stage.backward is None else stage.backward) + occupied + extra
            for stage, occupied in zip(costs.stages, inputs, strict=True)
        ],
    ]


def _messages(costs: Costs, home: Sequence[int]) -> tuple[list[float], list[float]]:
    """The time of a message over each boundary, forward and backward; 0 between stages of one rank."""
    crosses = [home[below] != home[below + 1] for below in range(len(home) - 1)]
    return (
        [costs.message(costs.sends_forward, at) * apart for at, apart in enumerate(crosses)],
        [costs.message(costs.sends_backward, at) * apart for at, apart in enumerate(crosses)],
    )


def _occupied(costs: Costs, home: Sequence[int]) -> tuple[list[float], list[float]]:
    """The time for which the messages of each stage's forward, and of its backward, occupy the stage's rank."""
    if not costs.blocking:
        return [0.0] * len(home), [0.0] * len(home)
    up, down = _messages(costs, home)
    sums = [[a + b for a, b in zip([0.0, *times], [*times, 0.0], strict=True)] for times in (up, down)]
    return sums[0], sums[1]


def _lags(costs: Costs, home: Sequence[int]) -> list[list[float]]:
    """Per stage, for forward and backward: the time from the end of the maker of an input until the reader can start.

    A blocking receive is part of its reader's time and begins with its send, which is part of its maker's time; so the reader
    can start one message time before the end of the maker. The overhead before an action is part of its time too; a rank that
    waits spends the overhead while it waits.
    """
    sign = -1 if costs.blocking else 1
    up, down = _messages(costs, home)
    return [
        [0.0, *(sign * time - costs.overhead for time in up)],
        [*(sign * time - costs.overhead for time in down), 0.0],
    ]


def _reads(stages: int, microbatches: int) -> tuple[int, ...]:
    count = stages * microbatches
    forwards = [max(-1, op - microbatches) for op in range(count)]
    forwards[:microbatches] = [-1] * microbatches
    inputs = [count + op + microbatches for op in range(count)]
    inputs[-microbatches:] = range(count - microbatches, count)  # the last stage reads its own forwards
    return (*forwards, *inputs)
