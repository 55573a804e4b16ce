"""An order of operations that the search evaluates, and the times and bytes of its operations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import add
from typing import NamedTuple

from graphpp.schedules.search.problem import Problem

Fill = tuple[int, int]
"""(position in a rank's order, number of weight gradients that have run before the operation at this position)."""


@dataclass(frozen=True)
class Candidate:
    """An order of each rank's forwards and backwards. `whole[x]`: 1 if operation N + x is a whole backward.

    `patience[rank]`: a pending weight gradient fills a wait of at least this fraction of its own time, so 1 never delays the
    next operation. `beside[x]`: 1 if the backward N + x runs together with a following forward; empty: no pairs.
    """

    orders: list[list[int]]
    whole: bytearray
    patience: list[float]
    beside: bytearray = field(default_factory=bytearray)

    def mate(self, op: int, following: int) -> bool:
        """Whether the backward `op` runs together with `following`, the next operation of its order."""
        count = len(self.whole)
        return bool(self.beside) and count <= op < 2 * count and following < count and bool(self.beside[op - count])


@dataclass(frozen=True)
class Timed:
    """A solution with its times. `total`: the makespan plus the mean time at which the ranks finish."""

    problem: Problem
    candidate: Candidate
    makespan: float
    total: float

    @property
    def end(self) -> tuple[float, float]:
        """The makespan and `total` in the units of the costs."""
        return self.makespan * self.problem.unit, self.total * self.problem.unit

    @property
    def is_optimal(self) -> bool:
        """Whether no table can end sooner."""
        return self.makespan <= self.problem.bound() * (1 + 1e-9)


@dataclass(frozen=True)
class EvaluatedOrder(Timed):
    """A candidate with its times. `orders`: the candidate's, or complete rows; `ends[op]`: the end of each operation in them.

    `weights[rank]`: the weight gradients that are in no order, as they run, and `fills[rank]`: their places.
    """

    orders: Sequence[list[int]]
    ends: list[float]
    weights: list[list[int]]
    fills: list[list[Fill]]

    @cached_property
    def rows(self) -> list[list[int]]:
        """All operations of each rank, weight gradients included."""
        return [_row(*each) for each in zip(self.orders, self.weights, self.fills, strict=True)]


def _row(order: Sequence[int], weights: Sequence[int], fills: Sequence[Fill]) -> list[int]:
    row: list[int] = []
    at = done = 0
    for position, count in fills:
        row += [*order[at:position], *weights[done:count]]
        at, done = position, count
    return [*row, *order[at:], *weights[done:]]


class OperationCosts(NamedTuple):
    """By operation: its time, the bytes that its rank needs while it runs, and the change of the rank's bytes at its end.

    `leaves[op]`: 1 if an input gradient leaves a weight gradient that is in no order; `busy[rank]`: the sum of its times.
    """

    took: Sequence[float]
    more: Sequence[int]
    change: Sequence[int]
    leaves: bytes
    busy: Sequence[float]


@lru_cache(maxsize=32)
def operation_costs(problem: Problem, whole: bytes) -> OperationCosts:
    """The costs of all operations that run alone; `whole` says which backwards are whole."""
    each, count = problem.microbatches, problem.count
    took, more, change = list(problem.took), [0] * len(problem.took), [0] * len(problem.took)
    busy = [0.0] * problem.ranks
    for stage, (needs, saved, kept) in enumerate(zip(problem.needs, problem.saved, problem.kept, strict=True)):
        at = stage * each
        forms = whole[at : at + each]
        first, then, last = (slice(kind * count + at, kind * count + at + each) for kind in range(3))
        inputs, wholes = took[count + at], problem.whole[stage]
        took[then] = [wholes if form else inputs for form in forms]
        more[first], change[first] = [max(needs.forward, saved)] * each, [saved] * each
        split = max(needs.inputs, kept - saved)
        more[then] = [needs.whole if form else split for form in forms]
        change[then] = [-saved if form else kept - saved for form in forms]
        more[last], change[last] = [needs.weights] * each, [-kept] * each
        busy[problem.home[stage]] += sum(took[first]) + sum(took[then]) + forms.count(0) * took[2 * count + at]
    for rank, messages in enumerate(problem.messages):
        busy[rank] += messages
    leaves = bytes(count) + bytes(not form for form in whole) + bytes(len(took) - 2 * count)
    return OperationCosts(took, more, change, leaves, busy)


def pair_costs(
    problem: Problem, candidate: Candidate, orders: Sequence[Sequence[int]]
) -> tuple[OperationCosts, Mapping[int, int]]:
    """The costs if some operations run in pairs, a pair's costs on its backward; the forward of each such backward."""
    alone = operation_costs(problem, bytes(candidate.whole))
    took, busy, more, change = list(alone.took), list(alone.busy), list(alone.more), list(alone.change)
    mates: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for op, following in pairwise(order):
            if candidate.mate(op, following):
                mates[op] = following
                time = pair_time(problem, candidate, op, following)
                busy[rank] += time - took[op] - took[following]
                took[op], took[following] = time, 0.0
                change[op] += change[following]
                more[op] = max(_bytes_of_pair(problem, candidate, op, following), change[op])
                more[following] = change[following] = 0
    return OperationCosts(took, more, change, alone.leaves, busy), mates


def peaks(problem: Problem, candidate: Candidate, rows: Sequence[Sequence[int]]) -> Iterator[int]:
    """The most bytes alive on each rank, for complete rows."""
    costs = operation_costs(problem, bytes(candidate.whole))
    if candidate.beside:
        costs, _ = pair_costs(problem, candidate, rows)
    for row in rows:
        alive = accumulate(map(costs.change.__getitem__, row), initial=0)
        yield max(map(add, alive, map(costs.more.__getitem__, row)), default=0)


def operation_time(problem: Problem, candidate: Candidate, op: int) -> float:
    """The time of a forward or a backward that runs alone."""
    x = op - problem.count
    return problem.whole[x // problem.microbatches] if x >= 0 and candidate.whole[x] else problem.took[op]


def pair_time(problem: Problem, candidate: Candidate, backward: int, forward: int) -> float:
    x = backward - problem.count
    pair = problem.beside[x // problem.microbatches, forward // problem.microbatches]
    return pair.whole if candidate.whole[x] else pair.split


def _bytes_of_pair(problem: Problem, candidate: Candidate, backward: int, forward: int) -> int:
    x = backward - problem.count
    needs = problem.needs[x // problem.microbatches]
    return (needs.whole if candidate.whole[x] else needs.inputs) + problem.needs[forward // problem.microbatches].forward
