"""Choose the rank of each stage, and where stages start, before an order is searched.

A model is a row of pieces; a stage is a run of them, and `home[stage]` is its rank. Local search moves a piece from one stage
to another, moves a stage to another rank, exchanges two stages, and cuts or joins stages. Neighbours are taken in the order of
a bound, and each one's step is timed under a few quick orders, with few microbatches. Equal arguments give equal placements:
the search counts forwards, not seconds. AdaPtis (arXiv 2509.23722) also decides cut, placement and order together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from math import inf
from random import Random
from typing import NamedTuple

from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.fill_waits import fill_waits
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.start_patterns import start_patterns
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs

_PATTERNS, _WINDOW = 8, 8
"""Patterns of a quick order, and the operations that `fill_waits` looks at in the best of them."""
_TIMED = 6
"""The neighbours of each round that are timed at the most."""
_FROM = 2
"""The starts that are improved."""
_BETTER = 1 - 1e-4
"""A step is taken if it shortens the step's time by this factor."""

Numbers = tuple[int, ...]


class Placed(NamedTuple):
    """`cut`: the first piece of each stage; `home`: its rank."""

    cut: Numbers
    home: Numbers


Value = tuple[float, float]
"""(bytes that ranks lack for one microbatch at a time, seconds of a step): less is better."""


@dataclass(frozen=True)
class PlacementSearch:
    """`pieces`: costs of the pieces; `costs`: of the stages of a cut; `room`: the bytes of each rank under a placement. `most`:
    the most stages (0: the cut stays)."""

    pieces: Costs
    ranks: int
    microbatches: int
    costs: Callable[[Numbers], Costs]
    room: Callable[[Placed], Sequence[float]]
    most: int = 0

    def best(self, starts: Iterable[Placed], work: float) -> list[Placed]:
        """Placements, the best first. Quick orders take `work` forwards, and more only for the starts."""
        times: dict[Placed, Value] = {}
        for start in dict.fromkeys(starts):
            times[start], spent = self._timed(start)
            work -= spent
        for start in sorted(times, key=times.__getitem__)[:_FROM]:
            work = self._improve(start, times, work)
        return sorted(times, key=lambda each: (times[each], self.bound(each)))

    def in_a_row(self) -> Placed:
        """Each piece a stage, and neighbouring stages on one rank, about as much work on each."""
        sums, stages = self._sums[0], range(len(self.pieces.stages))
        share = 2 * sums[-1] / self.ranks or 1.0
        home = (min(self.ranks - 1, int((sums[stage] + sums[stage + 1]) / share)) for stage in stages)
        return Placed(tuple(stages), tuple(home))

    def balanced(self, placed: Placed) -> Placed:
        """The placement with its cut moved while the bound falls."""
        value = self.bound(placed)
        while True:
            found = min(((self.bound(each), each) for each in self._shifted(placed)), default=None)
            if found is None or found[0] >= value:
                return placed
            value, placed = found

    def bound(self, placed: Placed) -> tuple[float, float, float]:
        """A lower bound of the value without overlaps; and the sum of the squares of the ranks' seconds."""
        loads, first, saved = [0.0] * self.ranks, [inf] * self.ranks, [0] * self.ranks
        sums, before, held = self._sums
        for rank, begin, end in zip(placed.home, placed.cut, (*placed.cut[1:], len(sums) - 1), strict=True):
            loads[rank] += sums[end] - sums[begin]
            saved[rank] += held[end] - held[begin]
            first[rank] = min(first[rank], before[begin])
        lacking = sum(max(0.0, own - room) for own, room in zip(saved, self.room(placed), strict=True))
        seconds = max(wait + self.microbatches * load for wait, load in zip(first, loads, strict=True) if wait < inf)
        return lacking, seconds, sum(load * load for load in loads)

    @cached_property
    def _sums(self) -> tuple[list[float], list[float], list[int]]:
        """Sums over the pieces: the least seconds of a microbatch, its forwards' seconds, its saved bytes."""
        parts = self.pieces.stages
        each = (one.forward + min(one.of(Kind.B), one.input_grad + one.weight_grad) for one in parts)
        forwards, saved = (one.forward for one in parts), (one.saved_bytes for one in parts)
        return [0.0, *accumulate(each)], [0.0, *accumulate(forwards)], [0, *accumulate(saved)]

    def _improve(self, current: Placed, times: dict[Placed, Value], work: float) -> float:
        """Move while a neighbour is better; the work that is left."""
        while work > 0:
            bounds = sorted((self.bound(each), each) for each in set(self._neighbours(current)) - times.keys())
            for bound, each in bounds[:_TIMED]:
                lacking, seconds = times[current]
                if bound[:2] >= (lacking, seconds * _BETTER) or work <= 0:
                    return work
                times[each], spent = self._timed(each)
                work -= spent
                if times[each] < (lacking, seconds * _BETTER):
                    current = each
                    break
            else:
                return work
        return work

    def _timed(self, placed: Placed) -> tuple[Value, int]:
        """The value under a quick order, with infinite seconds if none fits, and the forwards that were ordered."""
        few = min(self.microbatches, 2 * self.ranks)
        problem = Problem.of(self.costs(placed.cut), dict(enumerate(placed.home)), few, self.room(placed))
        whole = bytearray(flag for stage in range(problem.stages) for flag in [problem.prefers_whole(stage)] * few)
        patterns = islice(start_patterns(problem, whole, Random(0)), _PATTERNS)
        found = [order for order in (evaluate_order(problem, each) for each in patterns) if order]
        for first in sorted(found, key=lambda each: each.total)[:1]:
            filled = evaluate_order(problem, fill_waits(problem, first.candidate, _WINDOW))
            found += [filled] if filled else []
        soonest = min((order.makespan for order in found), default=inf)
        seconds = (soonest + (self.microbatches - few) * problem.period()) * problem.unit
        return (self.bound(placed)[0], seconds), problem.count

    # ------------------------------------------------------------------------------------------------ neighbours

    def _neighbours(self, placed: Placed) -> Iterator[Placed]:
        cut, home = placed
        stages = range(len(home))
        for stage in stages:
            for rank in (rank for rank in range(self.ranks) if rank != home[stage]):
                yield Placed(cut, (*home[:stage], rank, *home[stage + 1 :]))
            for other in (other for other in stages[stage + 1 :] if home[stage] != home[other]):
                ranks = list(home)
                ranks[stage], ranks[other] = home[other], home[stage]
                yield Placed(cut, tuple(ranks))
        if self.most:
            yield from (*self._shifted(placed), *self._joined(placed), *self._halved(placed))

    def _shifted(self, placed: Placed) -> Iterator[Placed]:
        """One piece moves from a stage to another, through all stages between them."""
        cut, end = placed.cut, len(self.pieces.stages)
        for first in range(1, len(cut)):
            for last in range(first, len(cut)):
                for by in (-1, 1):
                    moved = (*cut[:first], *(begin + by for begin in cut[first : last + 1]), *cut[last + 1 :])
                    if all(one < other for one, other in pairwise((*moved, end))):
                        yield Placed(moved, placed.home)

    def _joined(self, placed: Placed) -> Iterator[Placed]:
        cut, home = placed
        for stage in range(1, len(cut)) if len(cut) > self.ranks else ():
            yield Placed((*cut[:stage], *cut[stage + 1 :]), (*home[:stage], *home[stage + 1 :]))
            yield Placed((*cut[:stage], *cut[stage + 1 :]), (*home[: stage - 1], *home[stage:]))

    def _halved(self, placed: Placed) -> Iterator[Placed]:
        cut, home = placed
        for stage, (begin, end) in enumerate(pairwise((*cut, len(self.pieces.stages)))):
            for rank in range(self.ranks) if end - begin > 1 and len(cut) < self.most else ():
                middle = (begin + end) // 2
                yield Placed((*cut[: stage + 1], middle, *cut[stage + 1 :]), (*home[: stage + 1], rank, *home[stage + 1 :]))


def loop_of(stages: int, ranks: int) -> Numbers:
    return tuple(stage % ranks for stage in range(stages))


def v_of(stages: int, ranks: int) -> Numbers:
    """Down the ranks and up again."""
    return tuple(stage % ranks if stage // ranks % 2 == 0 else ranks - 1 - stage % ranks for stage in range(stages))
