"""Compute the times of a sequence, only from the place where it differs from another one.

One pass gives all times. `Sequenced.states` has the state of the ranks before every `Elements.every`th element, where a
sequence with an equal beginning continues. Sequences with pairs are evaluated as rows. The result is None if a rank needs more
bytes than it has, or if the total is above `limit`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import inf
from typing import NamedTuple

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder, Fill, Timed, operation_costs
from graphpp.schedules.search.evaluate import evaluate_rows
from graphpp.schedules.search.sequence import Elements


class _State(NamedTuple):
    """The ends of the ranks' last operations, their bytes alive, and the least times at which the ranks can finish."""

    free: list[float]
    live: list[int]
    least: list[float]


_Operation = tuple[int, int, int, float, float, int, int]
"""An operation of an element, its rank, the operation that it reads, its lag, and its time and bytes as in `OperationCosts`."""


@dataclass(frozen=True, eq=False)
class Sequenced(Timed):
    elements: Elements
    sequence: list[int]
    ends: list[float]
    states: list[_State]

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


def evaluate_sequence(
    elements: Elements, candidate: Candidate, sequence: list[int], limit: float = inf, like: Sequenced | None = None
) -> Sequenced | None:
    """The times of a sequence. `like`: a sequence whose results are reused as far as it has the same elements and forms."""
    if any(candidate.beside):
        found = evaluate_rows(elements.problem, candidate, elements.rows(sequence), limit)
        if found is None:
            return None
        return Sequenced(elements.problem, candidate, found.makespan, found.total, elements, sequence, found.ends, [])
    start, every = 0, elements.every
    if like is not None and like.candidate.whole == candidate.whole and like.states:
        other = like.sequence
        while start < len(sequence) and sequence[start : start + every] == other[start : start + every]:
            start += every
    if like is None or not start:
        return _passed(elements, candidate, sequence, limit, [0.0] * (len(elements.problem.took) + 1), [])
    return _passed(elements, candidate, sequence, limit, list(like.ends), like.states[: start // every + 1])


def _passed(
    elements: Elements, candidate: Candidate, sequence: list[int], limit: float, ends: list[float], states: list[_State]
) -> Sequenced | None:
    """Continue from the last of `states`; `ends`: the ends of the earlier operations."""
    ranks, cap = elements.problem.ranks, elements.problem.cap
    operations, busy = _operations(elements, bytes(candidate.whole))
    if not states:
        states.append(_State([0.0] * ranks, [0] * ranks, busy))
    free, live, least = list(states[-1].free), list(states[-1].live), list(states[-1].least)
    mean, longest = sum(least) / ranks, max(least)
    for first in range((len(states) - 1) * elements.every, len(sequence), elements.every):
        for element in sequence[first : first + elements.every]:
            for op, rank, reads, lag, took, more, change in operations[element]:
                if live[rank] + more > cap[rank]:
                    return None
                now, there = free[rank], ends[reads] + lag
                if there > now:
                    mean += (there - now) / ranks
                    least[rank] += there - now
                    longest = max(longest, least[rank])
                    if mean + longest > limit:
                        return None
                    now = there
                live[rank] += change
                free[rank] = ends[op] = now + took
        states.append(_State(list(free), list(live), list(least)))
    makespan = max(free)
    total = makespan + sum(free) / ranks
    return Sequenced(elements.problem, candidate, makespan, total, elements, sequence, ends, states)


@lru_cache(maxsize=4)
def _operations(elements: Elements, whole: bytes) -> tuple[Sequence[tuple[_Operation, ...]], list[float]]:
    """The operations of each element, and the sum of the times of each rank."""
    problem, count = elements.problem, elements.problem.count
    split = _in_form(elements, 0)
    joined = _in_form(elements, 1) if any(whole) else split
    busy = list(operation_costs(problem, bytes(count)).busy)
    for x in (x for x, form in enumerate(whole) if form):
        parts = problem.took[count + x] + problem.took[2 * count + x]
        busy[problem.rank_of(x)] += problem.whole[x // problem.microbatches] - parts
    backwards = [(joined if form else split)[count + x] for x, form in enumerate(whole)]
    return [*split[:count], *backwards, *split[2 * count :]], busy


@lru_cache(maxsize=4)
def _in_form(elements: Elements, form: int) -> Sequence[tuple[_Operation, ...]]:
    """The operations of each element if all backwards have one form: one, or the send and the receive of a message."""
    problem, messages = elements.problem, 3 * elements.problem.count
    costs = operation_costs(problem, bytes([form]) * problem.count)
    sends = [ranks or (-1, -1) for ranks in elements.ranks[messages:]]
    ranks = [rank for rank, in elements.ranks[:messages]] + [send for send, _ in sends] + [receive for _, receive in sends]
    operations = list(
        zip(range(len(ranks)), ranks, problem.reads, problem.lag, costs.took, costs.more, costs.change, strict=True)
    )
    sent, received = operations[messages : messages + len(sends)], operations[messages + len(sends) :]
    return [*zip(operations[:messages]), *zip(sent, received, strict=True)]
