"""Choose the rank of each stage, and where stages start, before an order is searched.

A model is a row of pieces; a stage is a run of them, and `home[stage]` is its rank. Local search moves a piece from one stage
to another, moves a stage to another rank, exchanges two stages, and cuts or joins stages. Neighbours are taken in the order of
a bound, and each one's step is timed under a few quick orders, with few microbatches. Equal arguments give equal placements:
the search counts forwards, not seconds. AdaPtis (arXiv 2509.23722) also decides cut, placement and order together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, islice, pairwise
from math import inf
from random import Random
from typing import NamedTuple

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder
from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.fill_waits import fill_waits
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.start_patterns import start_patterns
from graphpp.schedules.search.tables import candidate_of, rows_of
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule

_PATTERNS, _FEWEST, _EFFORT = 40, 4, 30_000
"""The most and the fewest patterns of a start, and between them so many forwards of all its patterns."""
_WINDOWS = (3, 8)
"""The numbers of operations that `fill_waits` looks at."""
_TIMED = 12
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


class Found(NamedTuple):
    """A placement with an order (None: none fits). `lacking`: the bytes that ranks lack for one microbatch at a time."""

    lacking: float
    seconds: float
    placed: Placed
    order: EvaluatedOrder | None = None

    @property
    def value(self) -> tuple[float, float]:
        return self.lacking, self.seconds


@dataclass(frozen=True)
class PlacementSearch:
    """`pieces`: costs of the pieces; `costs`, `room`: costs of the stages and bytes of each rank under a placement. `most`: the
    most stages (0: the cut stays)."""

    pieces: Costs
    ranks: int
    microbatches: int
    costs: Callable[[Placed], Costs]
    room: Callable[[Placed], Sequence[float]]
    most: int = 0

    def best(self, starts: Iterable[Found], work: float) -> list[Found]:
        """Placements with their orders, the best first, after orders of `work` forwards."""
        found = {start.placed: start for start in starts}
        for start in sorted(found.values(), key=lambda each: (each.value, each.placed))[:_FROM]:
            work = self._improve(start, found, work)
        return sorted(found.values(), key=lambda each: (each.value, self.bound(each.placed)))

    def start(self, placed: Placed, table: Schedule | None = None) -> Found:
        """The placement with the order of a table, or of the best of a few patterns."""
        problem = self._problem(placed)
        if table is not None:
            return self._found(placed, [evaluate_order(problem, candidate_of(problem, rows_of(problem, table)))])
        whole = bytearray(problem.prefers_whole(op // problem.microbatches) for op in range(problem.count))
        most = max(_FEWEST, min(_PATTERNS, _EFFORT // problem.count))
        patterns = (evaluate_order(problem, each) for each in islice(start_patterns(problem, whole, Random(0)), most))
        return self._found(placed, sorted(filter(None, patterns), key=lambda each: each.total)[:2])

    def in_a_row(self) -> Placed:
        """Each piece a stage, and neighbouring stages on one rank, about as much work on each."""
        sums, stages = self._sums[0], range(len(self.pieces.stages))
        share = 2 * sums[-1] / self.ranks or 1.0
        home = (min(self.ranks - 1, int((sums[stage] + sums[stage + 1]) / share)) for stage in stages)
        return Placed(tuple(stages), tuple(home))

    def balanced(self, home: Numbers) -> Placed:
        """Stages on these ranks with a low bound: from stages of about equal work, one piece moves at a time."""
        sums, stages = self._sums[0], len(home)
        cut, pieces = [0], len(self.pieces.stages)
        for stage in range(1, stages):
            first = bisect_left(sums, sums[-1] * stage / stages)
            cut.append(min(max(first, cut[-1] + 1), pieces - stages + stage))
        placed = Placed(tuple(cut), home)
        value = self.bound(placed)
        while True:
            found = min(((self.bound(each), each) for each in self._shifted(placed)), default=None)
            if found is None or found[0] >= value:
                return placed
            value, placed = found

    def bound(self, placed: Placed) -> tuple[float, float, float]:
        """A lower bound of the value; and the sum of the squares of the ranks' seconds."""
        loads, first, saved = [0.0] * self.ranks, [inf] * self.ranks, [0] * self.ranks
        exchanged = loads.copy()
        sums, before, held, collectives = self._sums
        for rank, begin, end in zip(placed.home, placed.cut, (*placed.cut[1:], len(sums) - 1), strict=True):
            loads[rank] += sums[end] - sums[begin]
            exchanged[rank] += collectives[end] - collectives[begin]
            saved[rank] += held[end] - held[begin]
            first[rank] = min(first[rank], before[begin])
        # an OVERLAP_F_B hides no more than all collectives, or all other computation
        loads = [own - self.pieces.hidden * min(most, own / 2) for own, most in zip(loads, exchanged, strict=True)]
        lacking = sum(max(0.0, own - room) for own, room in zip(saved, self.room(placed), strict=True))
        seconds = max(wait + self.microbatches * load for wait, load in zip(first, loads, strict=True) if wait < inf)
        seconds *= min(1.0, self.pieces.overlap)
        return lacking, seconds, sum(load * load for load in loads)

    @cached_property
    def _sums(self) -> tuple[list[float], list[float], list[int], list[float]]:
        """Sums over the pieces: the least seconds of a microbatch, its forwards' seconds, its saved bytes, and the most seconds
        of its collectives."""
        parts = self.pieces.stages
        each = (one.forward + min(one.of(Kind.B), one.input_grad + one.weight_grad) for one in parts)
        forwards, saved = (one.forward for one in parts), (one.saved_bytes for one in parts)
        lines = ({kind: one.lines(kind).exchanged for kind in (Kind.F, Kind.B, Kind.I, Kind.W)} for one in parts)
        exchanged = (one[Kind.F] + max(one[Kind.B], one[Kind.I] + one[Kind.W]) for one in lines)
        sums = [[0.0, *accumulate(values)] for values in (each, forwards, exchanged)]
        return sums[0], sums[1], [0, *accumulate(saved)], sums[2]

    def _improve(self, current: Found, found: dict[Placed, Found], work: float) -> float:
        """Move while a neighbour is better; the work that is left."""
        while work > 0:
            others = set(filter(self._fills, self._neighbours(current.placed))) - found.keys()
            bounds = sorted((self.bound(each), each) for each in others)
            for bound, each in bounds[:_TIMED]:
                limit = current.lacking, current.seconds * _BETTER
                if bound[:2] >= limit or work <= 0:
                    return work
                found[each] = self._moved(current, each)
                work -= len(each.cut) * self.microbatches
                if found[each].value < limit:
                    current = found[each]
                    break
            else:
                return work
        return work

    def _fills(self, placed: Placed) -> bool:
        """Whether each rank has a stage, as it must if the cut may move."""
        return not self.most or len(set(placed.home)) == self.ranks

    def _moved(self, old: Found, placed: Placed) -> Found:
        """The placement under the order of another one: operations in the order of their ends there."""
        problem, order = self._problem(placed), old.order
        if order is None:
            return self.start(placed)
        many, stages = problem.microbatches, range(problem.stages)
        middles = ((first + end - 1) // 2 for first, end in pairwise((*placed.cut, len(self.pieces.stages))))
        alike = len(old.placed.cut) == problem.stages
        before = stages if alike else [bisect_right(old.placed.cut, middle) - 1 for middle in middles]
        timed: list[list[tuple[float, int, int]]] = [[] for _ in range(self.ranks)]
        for stage, was in zip(stages, before, strict=True):
            for kind, step in enumerate((stage, 2 * problem.stages - stage)):
                first, then = kind * problem.count + stage * many, kind * order.problem.count + was * many
                timed[placed.home[stage]] += [(order.ends[then + m], step, first + m) for m in range(many)]
        whole = bytearray(order.candidate.whole[was * many + m] for was in before for m in range(many))
        orders = [[op for *_, op in sorted(each)] for each in timed]
        return self._found(placed, [evaluate_order(problem, Candidate(orders, whole, order.candidate.patience))])

    def _found(self, placed: Placed, orders: Iterable[EvaluatedOrder | None]) -> Found:
        """The placement with the best of these orders, waits filled."""
        known = [order for order in orders if order]
        for order in tuple(known):
            filled = (evaluate_order(order.problem, fill_waits(order.problem, order.candidate, window)) for window in _WINDOWS)
            known += [each for each in filled if each]
        best = min(known, key=lambda each: each.end, default=None)
        return Found(self.bound(placed)[0], best.end[0] if best else inf, placed, best)

    def _problem(self, placed: Placed) -> Problem:
        costs, home = self.costs(placed), dict(enumerate(placed.home))
        return Problem.of(costs, home, self.microbatches, self.room(placed))

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
