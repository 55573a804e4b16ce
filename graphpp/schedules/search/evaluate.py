"""Compute the times of an order of operations, and the places of the weight gradients that it leaves open.

- The result is None if the order needs more memory than a rank has, or deadlocks, or its total is above `limit`. Times equal
  the simulator's, except for an order without messages if messages occupy ranks.
- `evaluate_order` takes orders of forwards and backwards: a weight gradient runs where its rank would wait long enough, where
  an operation needs its bytes, or at the end. `evaluate_rows` takes complete rows, in which all operations have their places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from operator import eq

from graphpp.schedules.search.candidate import (
    Candidate,
    EvaluatedOrder,
    Fill,
    OperationCosts,
    operation_costs,
    pair_costs,
)
from graphpp.schedules.search.problem import Problem

_NEVER = -1e300
"""The end of an operation that has not run."""


def evaluate_order(problem: Problem, candidate: Candidate, limit: float = inf) -> EvaluatedOrder | None:
    return _evaluate(problem, candidate, candidate.orders, limit, fill=True)


def evaluate_rows(
    problem: Problem, candidate: Candidate, rows: Sequence[list[int]], limit: float = inf
) -> EvaluatedOrder | None:
    """Evaluate complete rows; only the forms of backwards and the pairs of the candidate are read."""
    return _evaluate(problem, candidate, rows, limit, fill=False)


def _evaluate(
    problem: Problem, candidate: Candidate, orders: Sequence[list[int]], limit: float, *, fill: bool
) -> EvaluatedOrder | None:
    mates: Mapping[int, int] = {}
    if candidate.beside:
        costs, mates = pair_costs(problem, candidate, orders)
    else:
        costs = operation_costs(problem, bytes(candidate.whole))
    walk = _Walk(problem, candidate, orders, costs, fill)
    if not walk.run(mates, limit) or not walk.finish():
        return None
    makespan = max(walk.free)
    total = makespan + sum(walk.free) / problem.ranks
    return EvaluatedOrder(problem, candidate, makespan, total, orders, walk.ends, walk.weights, walk.fills)


class _Walk:
    """One pass over all rows. `at`, `free`, `live`: each rank's next position, the end of its last operation, its bytes alive.

    `weights[rank]`: the weight gradients whose place is open; the first `done[rank]` of them have run.
    """

    def __init__(
        self, problem: Problem, candidate: Candidate, orders: Sequence[list[int]], costs: OperationCosts, fill: bool
    ) -> None:
        ranks = range(problem.ranks)
        self.problem, self.patience, self.orders, self.costs = problem, candidate.patience, orders, costs
        self.leaves = costs.leaves if fill else bytes(len(costs.leaves))
        self.ends = [2 * _NEVER] * len(costs.took) + [0.0]  # the last entry is read for reads[op] == -1
        self.at, self.free, self.live, self.done = ([0] * len(ranks), [0.0] * len(ranks), [0] * len(ranks), [0] * len(ranks))
        self.weights: list[list[int]] = [[] for _ in ranks]
        self.fills: list[list[Fill]] = [[] for _ in ranks]

    def run(self, mates: Mapping[int, int], limit: float) -> bool:  # noqa: C901
        """Run each row as far as its inputs have arrived; False if the order is refused. The search spends its time here."""
        took, more, change, _, busy = self.costs
        ends, reads, lag, leaves, ranks = self.ends, self.problem.reads, self.problem.lag, self.leaves, self.problem.ranks
        least, longest, mean, count = list(busy), max(busy), sum(busy) / ranks, self.problem.count
        waiting: dict[int, int] = {}
        todo = list(range(ranks))
        while todo:
            rank = todo.pop()
            order, weights, cap = self.orders[rank], self.weights[rank], self.problem.cap[rank]
            at, now, live, last = self.at[rank], self.free[rank], self.live[rank], len(self.orders[rank])
            while at < last:
                op = order[at]
                blocker = reads[op]
                there = ends[blocker] + lag[op]
                if op in mates and there > _NEVER:
                    blocker = reads[mates[op]]
                    there = max(there, ends[blocker] + lag[mates[op]]) if ends[blocker] > _NEVER else _NEVER
                if there <= _NEVER:
                    waiting[blocker] = rank
                    break
                if weights and (there >= now or live + more[op] > cap) and self.done[rank] < len(weights):
                    now, live = self._fill(rank, at, now, live, there, more[op])
                if live + more[op] > cap:
                    return False
                if there > now:
                    mean += (there - now) / ranks
                    least[rank] += there - now
                    longest = max(longest, least[rank])
                    if mean + longest > limit:
                        return False
                    now = there
                now += took[op]
                live += change[op]
                ends[op] = now
                if leaves[op]:
                    weights.append(op + count)
                if op in waiting:
                    todo.append(waiting.pop(op))
                at += 1
            self.at[rank], self.free[rank], self.live[rank] = at, now, live
        return all(map(eq, self.at, map(len, self.orders)))

    def _fill(self, rank: int, at: int, now: float, live: int, there: float, more: int) -> tuple[float, int]:
        """The time and the bytes after the weight gradients that run before the operation at `at`, which needs `more` bytes."""
        problem, weights, done = self.problem, self.weights[rank], self.done[rank]
        took, more_, change, _, _ = self.costs
        cap, patience = problem.cap[rank], self.patience[rank]
        while done < len(weights):
            weight = weights[done]
            full, fits = live + more > cap, live + more_[weight] <= cap
            if not fits or not (full or there - now >= took[weight] * patience - 1e-9):
                break
            done += 1
            now += took[weight]
            live += change[weight]
        if done > self.done[rank]:
            self.done[rank] = done
            self.fills[rank].append((at, done))
        return now, live

    def finish(self) -> bool:
        """Run the remaining weight gradients; False if one does not fit into memory."""
        took, more, change, _, _ = self.costs
        for rank, weights in enumerate(self.weights):
            for weight in weights[self.done[rank] :]:
                if self.live[rank] + more[weight] > self.problem.cap[rank]:
                    return False
                self.live[rank] += change[weight]
                self.free[rank] += took[weight]
        return True
