"""Improve solutions by local search; and the steps that shift a piece of one microbatch on all its ranks at once.

- A result that is not much worse is accepted, with a limit that falls during the search (threshold accepting, Dueck and Scheuer
  1990). Results are equal for equal arguments on every machine (only +, - and * decide).
- Both kinds of steps are needed: `Shifts` moves orders whose weight gradients are placed by a rule, `move_elements.Moves` moves
  single operations and messages. Of 28 problems with known optima (`tests/schedules/search`) the worst table is 24.8 % slower
  than the optimum without `Moves` (4.6 % if messages occupy no rank), 2.5 % without `Shifts`, 1.4 % with both.
- A step of `Shifts` shifts the end times of successive operations of one microbatch (or of a few successive microbatches),
  sorts each rank by end times and evaluates the order. Exchanging two operations of one rank alone nearly always only adds a
  wait; shifting a piece on all its ranks together escapes such plateaus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Protocol, TypeVar

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder, Timed
from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.problem import Problem

_PATIENCE = (0.0, 0.25, 0.5, 0.75, 1.0)
_HEAT = 0.5
"""How much worse a result may be at first, in operations of mean length."""
_ROUNDS = (6, 3, 1)
"""The number of solutions that continue in each round; all rounds take the same number of steps."""

S = TypeVar("S", bound=Timed)
M = TypeVar("M", bound=Timed)


class Steps(Protocol[M]):
    random: Random

    def step(self, current: M, limit: float) -> M | None:
        """A random neighbour of a solution; None if its total is above the limit, or it needs too many bytes."""


def search_in_rounds(solutions: Iterable[S], steps: float, moves: Callable[[S], Steps[S]]) -> list[S]:
    """Search fewer solutions in every round, each for longer, until one is optimal. The best comes first."""
    best = distinct(solutions)
    for width in _ROUNDS:
        if not best or best[0].is_optimal:
            break
        each = int(steps / len(_ROUNDS) / width)
        best = distinct(local_search(solution, each, moves(solution)) for solution in best[:width])
    return best


def distinct(solutions: Iterable[S]) -> list[S]:
    """The solutions, best first, one for each makespan and total: solutions equal in both are most often the same table."""
    kept = {tuple(float(f"{time:.9g}") for time in solution.end): solution for solution in solutions}
    return [kept[key] for key in sorted(kept)]


def local_search(start: S, steps: int, moves: Steps[S]) -> S:
    """Take `steps` steps, or fewer if a lower bound is reached."""
    unit, bound = start.problem.operation_length(), start.problem.bound() * (1 + 1e-9)
    best = current = start
    for step in range(steps):
        if best.makespan <= bound:
            break
        luck = moves.random.random()
        limit = current.total + _HEAT * unit * (1 - step / steps) * luck * luck * luck * luck
        neighbour = moves.step(current, limit + 1e-9)
        if neighbour:
            current = neighbour
            if (current.makespan, current.total) < (best.makespan - 1e-9, best.total):
                best = current
    return best


class Shifts:
    def __init__(self, problem: Problem, random: Random) -> None:
        self.problem, self.random = problem, random
        self.unit = problem.operation_length()
        self.flips = [stage for stage in range(problem.stages) if problem.prefers_whole(stage)]

    def step(self, current: EvaluatedOrder, limit: float) -> EvaluatedOrder | None:
        candidate = self._neighbour(current)
        order = evaluate_order(self.problem, candidate, limit) if candidate else None
        return order if order and order.total <= limit else None

    def _neighbour(self, solution: EvaluatedOrder) -> Candidate | None:
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
        """Put a backward directly before a forward of its rank, as a pair; or split a pair."""
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
        """Successive operations of microbatch 0: one, the rest of one pass through the ranks, or any number."""
        stages, ranks = self.problem.stages, self.problem.ranks
        first, luck = self.random.randrange(2 * stages), self.random.random()
        last = first
        if luck > 0.7:
            last = self.random.randrange(first, 2 * stages)
        elif luck > 0.3:
            last = min(2 * stages, (first // ranks + 1) * ranks) - 1
        path = [*range(stages), *range(2 * stages - 1, stages - 1, -1)]
        return [step * self.problem.microbatches for step in path[first : last + 1]]
