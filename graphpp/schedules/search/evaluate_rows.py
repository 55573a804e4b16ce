"""Compute the times of complete rows: every forward, backward and weight gradient of each rank in a given order.

Contract
    in    a `Candidate`, of which the whole backwards and the pairs count, and per rank the order of all its operations
    out   an `EvaluatedOrder` with these rows; None if they need more memory than a rank has, or deadlock, or their value is
          above `limit`

The times equal the simulator's where messages do not block. `evaluate_order` chooses the places of weight gradients itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from graphpp.schedules.search.evaluate_order import Candidate, EvaluatedOrder, busy_times
from graphpp.schedules.search.problem import Problem


def evaluate_rows(  # noqa: C901, PLR0912, PLR0915
    problem: Problem, candidate: Candidate, rows: Sequence[list[int]], limit: float = inf
) -> EvaluatedOrder | None:
    """Walk all rows in one pass, each as far as its inputs are there. One long loop: the search spends its time here."""
    took, reads, lag, count, ranks = problem.took, problem.reads, problem.lag, problem.count, problem.ranks
    per_stage, saved, kept, needs = problem.microbatches, problem.saved, problem.kept, problem.needs
    whole, beside = candidate.whole, candidate.beside
    ends = [-1.0] * (2 * count) + [0.0]  # the last entry is read for reads[op] == -1
    at, free, live = [0] * ranks, [0.0] * ranks, [0] * ranks
    least = busy_times(problem, candidate, rows)
    mean, most = sum(least) / ranks, max(least)
    waiting: dict[int, int] = {}
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        row, cap = rows[rank], problem.cap[rank]
        k, now, bytes_ = at[rank], free[rank], live[rank]
        while k < len(row):
            op = row[k]
            stage = op % count // per_stage
            need = needs[stage]
            if op >= 2 * count:
                if ends[op - count] < 0 or bytes_ + need.weights > cap:
                    return None
                now += took[op]
                bytes_ -= kept[stage]
                k += 1
                continue
            there = ends[reads[op]]
            if there < 0:
                waiting[reads[op]] = rank
                break
            there += lag[op]
            mate = -1
            if op < count:
                more, change, time = need.forward, saved[stage], took[op]
            elif whole[op - count]:
                more, change, time = need.whole, -saved[stage], problem.whole[stage]
            else:
                more, change, time = need.inputs, kept[stage] - saved[stage], took[op]
            if beside and op >= count and beside[op - count] and k + 1 < len(row) and row[k + 1] < count:
                mate = row[k + 1]
                also = ends[reads[mate]]
                if also < 0:
                    waiting[reads[mate]] = rank
                    break
                there = max(there, also + lag[mate])
                pair = problem.beside[stage, mate // per_stage]
                time = pair.whole if whole[op - count] else pair.split
                more += needs[mate // per_stage].forward
                change += saved[mate // per_stage]
            if bytes_ + max(more, change) > cap:
                return None
            if there > now:
                mean += (there - now) / ranks
                least[rank] += there - now
                most = max(most, least[rank])
                if mean + most > limit:
                    return None
                now = there
            now += time
            bytes_ += change
            for each in (op,) if mate < 0 else (op, mate):
                ends[each] = now
                if each in waiting:
                    todo.append(waiting.pop(each))
                k += 1
        at[rank], free[rank], live[rank] = k, now, bytes_
    if any(k < len(row) for k, row in zip(at, rows, strict=True)):
        return None
    makespan = max(free)
    return EvaluatedOrder(candidate, list(rows), ends, makespan, makespan + sum(free) / ranks)
