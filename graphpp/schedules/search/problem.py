"""The scheduler's problem in numbers: operations are integers, and their properties are tuples indexed by them.

- With S stages, M microbatches and N = S M, operation x = stage * M + microbatch is a forward, N + x its input gradients (or
  its whole backward, if a candidate says so), 2 N + x its weight gradients.
- Times are fractions of the longest operation's time, so that one tolerance fits all problems. `reads[op]` is the operation
  whose result `op` needs, -1 for forwards of the first stage; `lag[op]` is the time from its end until the result is on the
  rank of `op`.
- A rank has `saved` bytes more from the end of a forward to the end of its backward; a split backward leaves `kept` bytes until
  the end of its weight gradients. While an operation runs, its rank has `needs` bytes more than before. A rank never has more
  than `cap` bytes alive.
- The runner's overhead and messages that occupy ranks are part of an operation's time. A forward and a backward of one rank may
  run together, as one OVERLAP_F_B; `beside[b, f]` has the times of the backward of stage b with the forward of stage f. The
  search makes pairs if they take less time than their parts (`pairs`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs


class Pair(NamedTuple):
    """The time of a forward and a backward that run together, with a split and with a whole backward."""

    split: float
    whole: float


class Needs(NamedTuple):
    """The bytes that an operation of a stage needs while it runs, in addition to the bytes alive before it."""

    forward: int
    inputs: int
    weights: int
    whole: int


@dataclass(frozen=True, eq=False)
class Problem:
    """The operations to order: times and lags by operation, bytes by stage, caps by rank. `home[stage]`: its rank."""

    ranks: int
    stages: int
    microbatches: int
    home: tuple[int, ...]
    took: tuple[float, ...]
    whole: tuple[float, ...]  # the time of a whole backward, per stage
    reads: tuple[int, ...]
    lag: tuple[float, ...]
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    needs: tuple[Needs, ...]
    cap: tuple[float, ...]
    count: int  # N, the number of forwards
    unit: float  # the longest operation's time, in the units of the costs
    overlap: float  # the factor on the time of pairs
    pairs: bool  # whether overlapping a forward and a backward saves time
    hidden: tuple[float, ...]  # at most, of a rank's computations of one microbatch, the time of collectives that pairs hide
    overhead: float
    blocking: bool  # messages occupy ranks, so the times are estimates
    beside: Mapping[tuple[int, int], Pair]
    messages: tuple[float, ...] = ()  # the time of each rank's sends and receives, where they are operations of their own

    @classmethod
    def of(cls, costs: Costs, home: Mapping[int, int], microbatches: int, cap: Sequence[float]) -> Problem:
        """The problem of ordering `microbatches` microbatches with stages placed as in `home`."""
        stages = len(costs.stages)
        homes = tuple(home[stage] for stage in range(stages))
        times, lags = _times(costs, homes), _lags(costs, homes)
        unit = max(map(max, times)) or 1.0
        times, lags = ([[time / unit for time in each] for each in listed] for listed in (times, lags))
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
            tuple(stage.bytes_after_input_grad for stage in costs.stages),
            tuple(Needs(*(stage.change(kind)[0] for kind in (Kind.F, Kind.I, Kind.W, Kind.B))) for stage in costs.stages),
            tuple(cap),
            stages * microbatches,
            unit,
            costs.overlap,
            costs.saves,
            tuple(_hidden(costs, homes, rank) / unit for rank in range(len(cap))),
            costs.overhead / unit,
            costs.blocking,
            _beside(costs, homes, times, unit),
        )

    def rank_of(self, op: int) -> int:
        return self.home[op % self.count // self.microbatches]

    def on(self, rank: int) -> list[int]:
        return [stage for stage in range(self.stages) if self.home[stage] == rank]

    def stage_times(self, stage: int) -> tuple[float, float, float]:
        """The times of a stage's forward, input gradients and weight gradients."""
        at = stage * self.microbatches
        return self.took[at], self.took[self.count + at], self.took[2 * self.count + at]

    def least(self, stage: int) -> float:
        """The least time for which a microbatch occupies a stage's rank, if pairs hide no collectives (`hidden`)."""
        forward, inputs, weights = self.stage_times(stage)
        apart = forward + min(inputs + weights, self.whole[stage])
        if not self.pairs:
            return apart
        # a pair has one overhead, and the times of its parts have one each
        share, once = self.overlap, self.overhead * max(0.0, 2 * self.overlap - 1)
        return max(0.0, min(apart, share * (forward + inputs) + weights - once, share * (forward + self.whole[stage]) - once))

    def work(self, rank: int) -> float:
        """The least time for which a microbatch occupies a rank."""
        return max(0.0, sum(map(self.least, self.on(rank))) - self.hidden[rank])

    def period(self) -> float:
        """The time between microbatches if the busiest rank never waits."""
        return max(map(self.work, range(self.ranks)))

    def operation_length(self) -> float:
        return self.period() * self.ranks / (3 * self.stages)

    def prefers_whole(self, stage: int) -> bool:
        """Whether a whole backward takes less time, or fewer bytes."""
        _, inputs, weights = self.stage_times(stage)
        faster = self.whole[stage] < inputs + weights - 1e-9
        return self.pairs or faster or self.kept[stage] > self.saved[stage] or self.needs_less_whole(stage)

    def needs_less_whole(self, stage: int) -> bool:
        """Whether a whole backward runs within fewer bytes than an I and its W."""
        needs, saved, kept = self.needs[stage], self.saved[stage], self.kept[stage]
        return saved + needs.whole < max(saved + needs.inputs, kept + needs.weights, kept)

    def bound(self) -> float:
        """A lower bound of the makespan: a rank's work after its first input, or the whole path of one microbatch."""
        start, way, share = 0.0, 0.0, min(1.0, self.overlap)
        heads: dict[int, float] = {}
        for stage in range(self.stages):
            at = stage * self.microbatches
            start += self.lag[at]
            heads.setdefault(self.home[stage], start)
            start += share * self.took[at]
            way += self.lag[self.count + at] + share * min(self.took[self.count + at], self.whole[stage])
        _, inputs, weights = self.stage_times(0)
        last = min(inputs + weights, self.whole[0]) - min(inputs, self.whole[0])
        return max(start + way + last, *(heads[rank] + self.microbatches * self.work(rank) for rank in heads))


def _times(costs: Costs, home: Sequence[int]) -> list[list[float]]:
    """Per stage: forward, input gradients, weight gradients, whole backward; each with the messages that occupy its rank."""
    forward, inputs = _occupied(costs, home)
    occupied = ((Kind.F, forward), (Kind.I, inputs), (Kind.W, [0.0] * len(home)), (Kind.B, inputs))
    return [
        [stage.of(kind) + messages + costs.overhead for stage, messages in zip(costs.stages, each, strict=True)]
        for kind, each in occupied
    ]


def _beside(costs: Costs, home: Sequence[int], times: Sequence[Sequence[float]], unit: float) -> dict[tuple[int, int], Pair]:
    """The times of each rank's pairs; `times`: from `_times`, in fractions of `unit`."""
    found, stages = {}, range(len(home))
    for b, f in ((b, f) for b in stages for f in stages if home[b] == home[f]):
        forward, inputs = costs.stages[f].forward, costs.stages[b].input_grad
        # messages that occupy the rank, and one overhead, do not overlap
        apart = times[0][f] * unit - forward + times[1][b] * unit - inputs - costs.overhead
        split, together = (costs.together(((f, Kind.F, False), (b, kind, False))) + apart for kind in (Kind.I, Kind.B))
        found[b, f] = Pair(split / unit, together / unit)
    return found


def _hidden(costs: Costs, home: Sequence[int], rank: int) -> float:
    """At most, the time that pairs save because collectives hide: no more than all of them, or all other computation."""
    own = [stage for stage, where in zip(costs.stages, home, strict=True) if where == rank]
    forms = [[stage.lines(kind) for kind in kinds] for stage in own for kinds in ((Kind.F,), (Kind.I, Kind.B))]
    computed, exchanged = (sum(max(one[at] for one in each) for each in forms) for at in (0, 1))
    return costs.hidden * min(1.0, costs.overlap) * min(exchanged, computed)


def _messages(costs: Costs, home: Sequence[int]) -> tuple[list[float], list[float]]:
    """The time of a message over each boundary, forward and backward; 0 between stages of one rank."""
    crosses = [home[below] != home[below + 1] for below in range(len(home) - 1)]
    return (
        [costs.message(costs.sends_forward, at) * apart for at, apart in enumerate(crosses)],
        [costs.message(costs.sends_backward, at) * apart for at, apart in enumerate(crosses)],
    )


def _occupied(costs: Costs, home: Sequence[int]) -> tuple[list[float], list[float]]:
    """The time for which messages of each stage's forward, and of its backward, occupy the stage's rank."""
    if not costs.blocking:
        return [0.0] * len(home), [0.0] * len(home)
    up, down = _messages(costs, home)
    sums = [[a + b for a, b in zip([0.0, *times], [*times, 0.0], strict=True)] for times in (up, down)]
    return sums[0], sums[1]


def _lags(costs: Costs, home: Sequence[int]) -> list[list[float]]:
    """Per stage, for forward, input and weight gradients: the time from the end of an input's maker until the reader can start.

    A blocking receive is part of its reader's time, the send of its maker's, and both begin together: the reader can start one
    message time before the end of the maker. A rank spends the overhead of its next action while it waits.
    """
    sign = -1 if costs.blocking else 1
    up, down = _messages(costs, home)
    return [
        [0.0, *(sign * time - costs.overhead for time in up)],
        [*(sign * time - costs.overhead for time in down), 0.0],
        [0.0] * len(home),
    ]


def _reads(stages: int, microbatches: int) -> tuple[int, ...]:
    count = stages * microbatches
    forwards = [max(-1, op - microbatches) for op in range(count)]
    forwards[:microbatches] = [-1] * microbatches
    inputs = [count + op + microbatches for op in range(count)]
    inputs[-microbatches:] = range(count - microbatches, count)  # the last stage reads its own forwards
    return (*forwards, *inputs, *range(count, 2 * count))


def with_messages(estimate: Problem, costs: Costs) -> Problem:
    """The problem whose messages are operations of their own, so that the times of its rows are the simulator's.

    With N forwards, the SEND of the value that operation r reads has the number 3 N + r, and its RECV 5 N + r. A SEND occupies
    its rank from its start for the message's time, a RECV until the message has ended (`Costs.blocking`).
    """
    silent = replace(costs, blocking=False, sends_forward=(), sends_backward=())
    problem = Problem.of(silent, dict(enumerate(estimate.home)), estimate.microbatches, estimate.cap)
    count = problem.count
    directions = (costs.sends_forward, costs.sends_backward)
    up, down = ([costs.message(sends, at) for at in range(problem.stages - 1)] for sends in directions)
    seconds = [0.0, *up, *down, 0.0]  # of the message that a stage's forward reads, then of the one that its backward reads
    reads, busy = [*problem.reads, *[-1] * (4 * count)], [0.0] * problem.ranks
    took, lag = [*problem.took, *[0.0] * (4 * count)], [*problem.lag, *[0.0] * (4 * count)]
    for reader in range(2 * count):
        maker = problem.reads[reader]
        if maker >= 0 and problem.rank_of(maker) != problem.rank_of(reader):
            send, receive = 3 * count + reader, 5 * count + reader
            reads[reader], reads[receive], reads[send] = receive, send, maker
            took[send] = took[receive] = seconds[reader // problem.microbatches] / problem.unit + problem.overhead
            lag[receive] = -took[send]
            busy[problem.rank_of(maker)] += took[send]
            busy[problem.rank_of(reader)] += took[send]
    return replace(problem, took=tuple(took), lag=tuple(lag), reads=tuple(reads), messages=tuple(busy), blocking=True)
