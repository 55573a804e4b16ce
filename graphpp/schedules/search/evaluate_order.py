"""Complete an order of forwards and input gradients on each rank to a schedule: place the weight gradients, compute the times.

Contract
    in    a `Candidate`: per rank the order of its forwards and backwards, which backwards are whole, and how long a wait
          must be for a weight gradient to fill it
    out   an `EvaluatedOrder`: rows with the weight gradients in place and the time of every operation; None if the order
          needs more memory than a rank has, or deadlocks, or its value is above `limit`

A weight gradient runs where its rank would wait long enough, where a forward needs its bytes, or at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from graphpp.schedules.search.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """An order to evaluate. `whole[x]`: 1 where operation N + x is a whole backward.

    `patience[rank]`: a pending weight gradient fills a wait of at least this share of its own time; 1 never delays the next
    operation, 0 fills every wait.
    """

    orders: list[list[int]]
    whole: bytearray
    patience: list[float]


@dataclass(frozen=True)
class EvaluatedOrder:
    """A candidate with its rows and times.

    `ends[op]`: the end of each forward and backward; `value`: the makespan plus the mean time at which the ranks finish.
    """

    candidate: Candidate
    rows: list[list[int]]
    ends: list[float]
    makespan: float
    value: float


def busy_times(problem: Problem, candidate: Candidate) -> list[float]:
    """The time for which each rank computes."""
    total = [0.0] * problem.ranks
    for stage in range(problem.stages):
        forward, inputs, weights = problem.stage_times(stage)
        at = stage * problem.microbatches
        whole = sum(candidate.whole[at : at + problem.microbatches])
        split = problem.microbatches - whole
        total[problem.home[stage]] += (
            problem.microbatches * forward + whole * problem.whole[stage] + split * (inputs + weights)
        )
    return total


def evaluate_order(problem: Problem, candidate: Candidate, limit: float = inf) -> EvaluatedOrder | None:  # noqa: C901, PLR0912, PLR0915
    """Walk all rows in one pass, each as far as its inputs are there. One long loop: the search spends its time here."""
    took, reads, lag, count, ranks = problem.took, problem.reads, problem.lag, problem.count, problem.ranks
    per_stage, saved, kept = problem.microbatches, problem.saved, problem.kept
    whole, orders = candidate.whole, candidate.orders
    ends = [-1.0] * (2 * count) + [0.0]  # the last entry is read for reads[op] == -1
    at, free, live, done = [0] * ranks, [0.0] * ranks, [0] * ranks, [0] * ranks
    pending: list[list[int]] = [[] for _ in range(ranks)]
    rows: list[list[int]] = [[] for _ in range(ranks)]
    least = busy_times(problem, candidate)
    mean, most = sum(least) / ranks, max(least)
    waiting: dict[int, int] = {}
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        order, row, weights = orders[rank], rows[rank], pending[rank]
        k, now, bytes_, first = at[rank], free[rank], live[rank], done[rank]
        cap, patience = problem.cap[rank], candidate.patience[rank]
        while k < len(order):
            op = order[k]
            there = ends[reads[op]]
            if there < 0:
                waiting[reads[op]] = rank
                break
            there += lag[op]
            if op < count:
                size = saved[op // per_stage]
                while bytes_ + size > cap:
                    if first == len(weights):
                        return None
                    weight = weights[first]
                    first += 1
                    row.append(weight)
                    now += took[weight]
                    bytes_ -= kept[(weight - 2 * count) // per_stage]
            while first < len(weights) and there - now >= took[weights[first]] * patience - 1e-9:
                weight = weights[first]
                first += 1
                row.append(weight)
                now += took[weight]
                bytes_ -= kept[(weight - 2 * count) // per_stage]
            if there > now:
                mean += (there - now) / ranks
                least[rank] += there - now
                most = max(most, least[rank])
                if mean + most > limit:
                    return None
                now = there
            row.append(op)
            if op < count:
                now += took[op]
                bytes_ += size
            else:
                stage = (op - count) // per_stage
                bytes_ -= saved[stage]
                if whole[op - count]:
                    now += problem.whole[stage]
                else:
                    now += took[op]
                    bytes_ += kept[stage]
                    weights.append(op + count)
                    if bytes_ > cap:
                        return None
            ends[op] = now
            if op in waiting:
                todo.append(waiting.pop(op))
            k += 1
        at[rank], free[rank], live[rank], done[rank] = k, now, bytes_, first
    if any(k < len(order) for k, order in zip(at, orders, strict=True)):
        return None
    for rank, weights in enumerate(pending):
        rows[rank] += weights[done[rank] :]
        free[rank] += sum(map(took.__getitem__, weights[done[rank] :]))
    makespan = max(free)
    return EvaluatedOrder(candidate, rows, ends, makespan, makespan + sum(free) / ranks)
