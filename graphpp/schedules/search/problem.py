"""The scheduler's problem in numbers: operations are integers, and everything about them is a list.

Contract
    With S stages, M microbatches and N = S M, operation x = stage * M + microbatch is the forward, N + x the input
    gradients (or the whole backward, where a candidate says so), 2 N + x the weight gradients. Times are
    shares of the longest operation's, so that one tolerance fits all. `reads[op]` is the
    operation whose result it needs, -1 for the first stage's forwards; `lag[op]` is how much later than its end that
    result is there. A rank holds `saved` bytes from the start of a forward, `gain` of them change at the end of the
    input gradients, `kept` go at the end of the weight gradients; never more than `cap`.

The runner's overhead and messages that hold up ranks are part of an operation's time here; `simulate`, which judges
the few best tables at the end, places them exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphpp.schedules.table.costs import Costs


@dataclass(frozen=True)
class Problem:
    """What is to be ordered. `home[stage]` is its rank; times and lags per operation, bytes per stage, caps per rank."""

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
    """N: how many forwards there are."""
    unit: float
    """The longest operation's time, in the units of the costs."""

    @classmethod
    def of(cls, costs: Costs, home: Mapping[int, int], microbatches: int, cap: Sequence[float]) -> Problem:
        """The problem for stages that stand on the ranks `home` tells."""
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
        """Forward, input gradients, weight gradients."""
        at = stage * self.microbatches
        return self.took[at], self.took[self.count + at], self.took[2 * self.count + at]

    def least(self, stage: int) -> float:
        """The least time a microbatch occupies a stage's rank."""
        forward, inputs, weights = self.stage_times(stage)
        return forward + min(inputs + weights, self.whole[stage])

    def period(self) -> float:
        """The time between microbatches when the busiest rank never waits."""
        return max(sum(map(self.least, self.on(rank))) for rank in range(self.ranks))

    def prefers_whole(self, stage: int) -> bool:
        """Whether a whole backward has an advantage: less time, or fewer bytes."""
        _, inputs, weights = self.stage_times(stage)
        return self.whole[stage] < inputs + weights - 1e-9 or self.kept[stage] > self.saved[stage]

    def bound(self) -> float:
        """A makespan that nothing can beat: a rank's work after its first input, or one microbatch's way."""
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
    """Per stage: forward, input gradients, weight gradients, whole backward; messages included where they hold ranks up."""
    forward, inputs = _held(costs, home)
    extra = costs.overhead
    return [
        [stage.forward + held + extra for stage, held in zip(costs.stages, forward, strict=True)],
        [stage.input_grad + held + extra for stage, held in zip(costs.stages, inputs, strict=True)],
        [stage.weight_grad + extra for stage in costs.stages],
        [
            (stage.input_grad + stage.weight_grad if stage.backward is None else stage.backward) + held + extra
            for stage, held in zip(costs.stages, inputs, strict=True)
        ],
    ]


def _messages(costs: Costs, home: Sequence[int]) -> tuple[list[float], list[float]]:
    """The time of a message over each boundary, forward and backward; 0 between stages of one rank."""
    crosses = [home[below] != home[below + 1] for below in range(len(home) - 1)]
    return (
        [costs.message(costs.sends_forward, at) * apart for at, apart in enumerate(crosses)],
        [costs.message(costs.sends_backward, at) * apart for at, apart in enumerate(crosses)],
    )


def _held(costs: Costs, home: Sequence[int]) -> tuple[list[float], list[float]]:
    """How long each stage's forward and backward hold their rank up with what they receive and send."""
    if not costs.blocking:
        return [0.0] * len(home), [0.0] * len(home)
    up, down = _messages(costs, home)
    sums = [[a + b for a, b in zip([0.0, *times], [*times, 0.0], strict=True)] for times in (up, down)]
    return sums[0], sums[1]


def _lags(costs: Costs, home: Sequence[int]) -> list[list[float]]:
    """Per stage, forward and backward: how much later than its maker's end an input is there.

    A receive that holds its rank up begins with its send, so within its maker's end. So does the overhead before an
    action, which is counted as the end of the one before it: a rank that waits spends it waiting.
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
    inputs[-microbatches:] = range(count - microbatches, count)  # the last stage's read its own forwards
    return (*forwards, *inputs)
