"""Improve a solution by local search: shift some successive steps of one microbatch in time, on all their ranks at once.

Contract
    in    an `EvaluatedOrder`, how many steps to take, and a source of randomness
    out   the best `EvaluatedOrder` found; equal for equal arguments on every machine (only +, - and * decide)

A step takes the end times of the current solution, shifts those of some successive operations of one microbatch (or of a
few microbatches in a row), sorts each rank by the end times again and evaluates the order. A result that is not much worse
is accepted, less and less so over the search (threshold accepting, Dueck and Scheuer 1990). Exchanging two operations of
one rank alone nearly always only adds a wait; shifting a piece on all its ranks together gets past such plateaus.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder
from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.problem import Problem

_PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)


def local_search(problem: Problem, start: EvaluatedOrder, steps: int, random: Random, heat: float = 0.5) -> EvaluatedOrder:
    """Take `steps` steps, or fewer if a lower bound is reached. `heat`: how much worse is accepted at first, in operations."""
    moves = _Moves(problem, random)
    bound = problem.bound() * (1 + 1e-9)
    best = current = start
    for step in range(steps):
        if best.makespan <= bound:
            break
        luck = random.random()
        limit = current.value + heat * moves.unit * (1 - step / steps) * luck * luck * luck * luck
        candidate = moves.neighbour(current)
        found = candidate and evaluate_order(problem, candidate, limit + 1e-9)
        if found and found.value <= limit + 1e-9:
            current = found
            if (found.makespan, found.value) < (best.makespan - 1e-9, best.value):
                best = found
    return best


class _Moves:
    def __init__(self, problem: Problem, random: Random) -> None:
        self.problem, self.random = problem, random
        self.unit = problem.period() * problem.ranks / (3 * problem.stages)
        self.flips = [stage for stage in range(problem.stages) if problem.prefers_whole(stage)]

    def neighbour(self, solution: EvaluatedOrder) -> Candidate | None:
        luck = self.random.random()
        if luck < 0.04:
            return self._patience(solution.candidate)
        if luck < 0.2 and self.flips:
            return self._flip(solution.candidate)
        if luck < 0.35 and self.problem.pairs:
            return self._pair(solution.candidate)
        return self._shift(solution)

    def _patience(self, old: Candidate) -> Candidate:
        patience = list(old.patience)
        patience[self.random.randrange(self.problem.ranks)] = self.random.choice(_PATIENCE)
        return replace(old, patience=patience)

    def _flip(self, old: Candidate) -> Candidate:
        whole = bytearray(old.whole)
        stage = self.random.choice(self.flips) * self.problem.microbatches
        for microbatch in self._microbatches():
            whole[stage + microbatch] ^= 1
        return replace(old, whole=whole)

    def _pair(self, old: Candidate) -> Candidate | None:
        """Put a backward directly before a forward of its rank, as a pair; or take a pair apart."""
        problem, beside = self.problem, bytearray(old.beside or self.problem.count)
        rank = self.random.randrange(problem.ranks)
        order = list(old.orders[rank])
        if len(order) < 2:
            return None
        at = self.random.randrange(len(order) - 1)
        first, second = order[at : at + 2]
        if (first < problem.count) == (second < problem.count):
            return None
        if first < problem.count:
            order[at : at + 2] = second, first
        backward = max(first, second) - problem.count
        beside[backward] = not old.mate(first, second)
        orders = [*old.orders[:rank], order, *old.orders[rank + 1 :]]
        return replace(old, orders=orders, beside=beside)

    def _shift(self, solution: EvaluatedOrder) -> Candidate | None:
        problem, old, ends = self.problem, solution.candidate, solution.ends
        by = self.unit * self.random.choice((-1, 1)) * (0.5 + 5 * self.random.random() * self.random.random())
        piece = self._piece()
        moved = {op + m: ends[op + m] + by for m in self._microbatches() for op in piece}
        orders = list(old.orders)
        for rank in {problem.home[op % problem.count // problem.microbatches] for op in piece}:
            orders[rank] = sorted(old.orders[rank], key=lambda op: moved.get(op, ends[op]))
        return replace(old, orders=orders) if orders != old.orders else None

    def _microbatches(self) -> Sequence[int]:
        first = self.random.randrange(self.problem.microbatches)
        if self.random.random() < 0.8:
            return (first,)
        return range(first, min(self.problem.microbatches, first + self.random.randint(1, 5)))

    def _piece(self) -> list[int]:
        """Some successive operations of microbatch 0: a single one, the rest of one way through the ranks, or any number."""
        stages, ranks = self.problem.stages, self.problem.ranks
        first, luck = self.random.randrange(2 * stages), self.random.random()
        last = first
        if luck > 0.7:
            last = self.random.randrange(first, 2 * stages)
        elif luck > 0.3:
            last = min(2 * stages, (first // ranks + 1) * ranks) - 1
        path = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
        return [step * self.problem.microbatches for step in path[first : last + 1]]
