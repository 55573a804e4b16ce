"""Complete an order of forwards and input gradients on each rank to a schedule: place the weight gradients, compute the times.

Contract
    in    a `Candidate`: per rank the order of its forwards and backwards, which backwards are whole, and how long a wait
          must be for a weight gradient to fill it
    out   an `EvaluatedOrder`: rows with the weight gradients in place and the time of every operation; None if the order
          needs more memory than a rank has, or deadlocks, or its value is above `limit`

A weight gradient runs where its rank would wait long enough, where a forward needs its bytes, or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from graphpp.schedules.search.problem import Problem


@dataclass(frozen=True)
class Candidate:
    """An order to evaluate. `whole[x]`: 1 where operation N + x is a whole backward.

    `patience[rank]`: a pending weight gradient fills a wait of at least this share of its own time; 1 never delays the next
    operation, 0 fills every wait. `beside[x]`: 1 where the backward N + x runs together with the forward that follows it in the
    order, if one follows; empty where no pair is allowed.
    """

    orders: list[list[int]]
    whole: bytearray
    patience: list[float]
    beside: bytearray = field(default_factory=bytearray)

    def mate(self, op: int, following: int) -> bool:
        """True if the backward `op` runs together with `following`, the next operation of its order."""
        count = len(self.whole)
        return bool(self.beside) and count <= op < 2 * count and following < count and bool(self.beside[op - count])


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


def busy_times(problem: Problem, candidate: Candidate, orders: Sequence[Sequence[int]]) -> list[float]:
    """The time for which each rank computes, and is occupied by messages."""
    total = [0.0] * problem.ranks
    for stage in range(problem.stages):
        forward, inputs, weights = problem.stage_times(stage)
        at = stage * problem.microbatches
        whole = sum(candidate.whole[at : at + problem.microbatches])
        split = problem.microbatches - whole
        total[problem.home[stage]] += (
            problem.microbatches * forward + whole * problem.whole[stage] + split * (inputs + weights)
        )
    if candidate.beside:
        for rank, order in enumerate(orders):
            for op, following in pairwise(order):
                if candidate.mate(op, following):
                    alone = operation_time(problem, candidate, op) + problem.took[following]
                    total[rank] += pair_time(problem, candidate, op, following) - alone
    return total


def operation_time(problem: Problem, candidate: Candidate, op: int) -> float:
    """The time of a forward or a backward that runs alone."""
    x = op - problem.count
    return problem.whole[x // problem.microbatches] if x >= 0 and candidate.whole[x] else problem.took[op]


def pair_time(problem: Problem, candidate: Candidate, backward: int, forward: int) -> float:
    """The time of a backward and a forward that run together."""
    x = backward - problem.count
    pair = problem.beside[x // problem.microbatches, forward // problem.microbatches]
    return pair.whole if candidate.whole[x] else pair.split


def evaluate_order(problem: Problem, candidate: Candidate, limit: float = inf) -> EvaluatedOrder | None:  # noqa: C901, PLR0911, PLR0912, PLR0915
    """Walk all rows in one pass, each as far as its inputs are there. One long loop: the search spends its time here."""
    took, reads, lag, count, ranks = problem.took, problem.reads, problem.lag, problem.count, problem.ranks
    per_stage, saved, kept, needs = problem.microbatches, problem.saved, problem.kept, problem.needs
    whole, orders, beside = candidate.whole, candidate.orders, candidate.beside
    ends = [-1.0] * (2 * count) + [0.0]  # the last entry is read for reads[op] == -1
    at, free, live, done = [0] * ranks, [0.0] * ranks, [0] * ranks, [0] * ranks
    pending: list[list[int]] = [[] for _ in range(ranks)]
    rows: list[list[int]] = [[] for _ in range(ranks)]
    least = busy_times(problem, candidate, orders)
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
            mate = -1
            if beside and op >= count and beside[op - count] and k + 1 < len(order) and order[k + 1] < count:
                mate = order[k + 1]
                pair = problem.beside[(op - count) // per_stage, mate // per_stage]
                also = ends[reads[mate]]
                if also < 0:
                    waiting[reads[mate]] = rank
                    break
                there = max(there, also + lag[mate])
            stage = op % count // per_stage
            if op < count:
                more = needs[stage].forward
            else:
                more = needs[stage].whole if whole[op - count] else needs[stage].inputs
                if mate >= 0:
                    more += needs[mate // per_stage].forward
            while first < len(weights):
                weight = weights[first]
                of = (weight - 2 * count) // per_stage
                full, fits = bytes_ + more > cap, bytes_ + needs[of].weights <= cap
                if not full and (not fits or there - now < took[weight] * patience - 1e-9):
                    break
                if not fits:
                    return None
                first += 1
                row.append(weight)
                now += took[weight]
                bytes_ -= kept[of]
            if bytes_ + more > cap:
                return None
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
                bytes_ += saved[stage]
            else:
                bytes_ -= saved[stage]
                if mate >= 0:
                    row.append(mate)
                    bytes_ += saved[mate // per_stage]
                    now += pair.whole if whole[op - count] else pair.split
                    ends[mate] = now
                elif whole[op - count]:
                    now += problem.whole[stage]
                else:
                    now += took[op]
                if not whole[op - count]:
                    bytes_ += kept[stage]
                    weights.append(op + count)
                    if bytes_ > cap:
                        return None
            ends[op] = now
            if op in waiting:
                todo.append(waiting.pop(op))
            k += 1
            if mate >= 0:
                if mate in waiting:
                    todo.append(waiting.pop(mate))
                k += 1
        at[rank], free[rank], live[rank], done[rank] = k, now, bytes_, first
    if any(k < len(order) for k, order in zip(at, orders, strict=True)):
        return None
    for rank, weights in enumerate(pending):
        for weight in weights[done[rank] :]:
            of = (weight - 2 * count) // per_stage
            if live[rank] + needs[of].weights > problem.cap[rank]:
                return None
            live[rank] -= kept[of]
        rows[rank] += weights[done[rank] :]
        free[rank] += sum(map(took.__getitem__, weights[done[rank] :]))
    makespan = max(free)
    return EvaluatedOrder(candidate, rows, ends, makespan, makespan + sum(free) / ranks)
