"""Compute the times of a sequence in one pass; a sequence with pairs is evaluated as rows.

The result is None if a rank needs more bytes than it has, or if the total is above `limit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder, Fill, Timed, operation_costs
from graphpp.schedules.search.evaluate import evaluate_rows
from graphpp.schedules.search.sequence import Elements


@dataclass(frozen=True, eq=False)
class Sequenced(Timed):
    elements: Elements
    sequence: list[int]
    ends: list[float]

    @cached_property
    def solution(self) -> EvaluatedOrder:
        rows = self.elements.rows(self.sequence)
        weights: list[list[int]] = [[] for _ in rows]
        fills: list[list[Fill]] = [[] for _ in rows]
        return EvaluatedOrder(self.problem, self.candidate, self.makespan, self.total, rows, self.ends, weights, fills)


def sequences(elements: Elements, candidate: Candidate, rows: Sequence[list[int]]) -> Iterator[Sequenced]:
    """The sequences of rows of computations: messages placed by `add_send_recv`, and as early and as late as possible."""
    problem, first = elements.problem, elements.sequence(rows, candidate)
    found = evaluate_sequence(elements, candidate, first)
    if found is None:
        return
    yield found
    ends, messages = found.ends, [each for each in first if each >= 3 * problem.count]
    for late in (False, True) if messages else ():
        keys = list(ends)
        for message in messages:
            reader = message - 3 * problem.count
            keys[message] = ends[reader] - problem.took[reader] if late else ends[problem.reads[message]]
        timed = evaluate_sequence(elements, candidate, elements.sorted(first, keys.__getitem__))
        if timed:
            yield timed


def evaluate_sequence(elements: Elements, candidate: Candidate, sequence: list[int], limit: float = inf) -> Sequenced | None:
    if any(candidate.beside):
        found = evaluate_rows(elements.problem, candidate, elements.rows(sequence), limit)
        if found is None:
            return None
        return Sequenced(elements.problem, candidate, found.makespan, found.total, elements, sequence, found.ends)
    ranks, cap, operations = elements.problem.ranks, elements.problem.cap, elements.operations
    took, more, change, _, busy = operation_costs(elements.problem, bytes(candidate.whole))
    free, live, least, ends = [0.0] * ranks, [0] * ranks, list(busy), [0.0] * (len(took) + 1)
    mean, longest = sum(least) / ranks, max(least)
    for element in sequence:
        for op, rank, reads, lag in operations[element]:
            if live[rank] + more[op] > cap[rank]:
                return None
            now, there = free[rank], ends[reads] + lag
            if there > now:
                mean += (there - now) / ranks
                least[rank] += there - now
                longest = max(longest, least[rank])
                if mean + longest > limit:
                    return None
                now = there
            live[rank] += change[op]
            free[rank] = ends[op] = now + took[op]
    makespan = max(free)
    total = makespan + sum(free) / ranks
    return Sequenced(elements.problem, candidate, makespan, total, elements, sequence, ends)
