"""Improve a solution by moving single operations within their ranks' rows, weight gradients included.

Contract
    in    an `EvaluatedOrder`, how many steps to take, and a source of randomness
    out   the best `EvaluatedOrder` found; equal for equal arguments on every machine

`local_search` places weight gradients by a rule, in the order of their input gradients. A step of this file moves one
operation, exchanges two, or makes a backward whole or split, so a short weight gradient may run before an older one where a
forward needs bytes. A result that is a little worse is accepted, as in `local_search`.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder
from graphpp.schedules.search.evaluate import evaluate_rows
from graphpp.schedules.search.problem import Problem

_FARTHEST = 8
"""Places by which one step moves an operation."""


def move_single(problem: Problem, start: EvaluatedOrder, steps: int, random: Random, heat: float = 0.3) -> EvaluatedOrder:
    """Take `steps` steps, or fewer if a lower bound is reached. `heat`: how much worse is accepted at first, in operations."""
    bound, unit = problem.bound() * (1 + 1e-9), problem.period() * problem.ranks / (3 * problem.stages)
    best = current = start
    for step in range(steps):
        if best.makespan <= bound:
            break
        luck = random.random()
        limit = current.value + heat * unit * (1 - step / steps) * luck * luck * luck * luck
        neighbour = _neighbour(problem, current, random)
        found = neighbour and evaluate_rows(problem, *neighbour, limit + 1e-9)
        if found and found.value <= limit + 1e-9:
            current = found
            if (found.makespan, found.value) < (best.makespan - 1e-9, best.value):
                best = found
    return best


def _neighbour(problem: Problem, old: EvaluatedOrder, random: Random) -> tuple[Candidate, list[list[int]]] | None:
    """Another form of backwards, or other places of one or two operations of a rank; None if nothing changes."""
    rank = random.randrange(problem.ranks)
    row, candidate = old.rows[rank], old.candidate
    if len(row) < 2:
        return None
    flips = [problem.prefers_whole(stage) for stage in range(problem.stages)]
    backwards = [op for op in row if op // problem.count == 1 and flips[op % problem.count // problem.microbatches]]
    if backwards and random.random() < 0.2:
        op = random.choice(backwards)
        whole = bytearray(candidate.whole)
        alike = [each for each in backwards if each // problem.microbatches == op // problem.microbatches]
        for each in [op] if random.random() < 0.7 else alike:
            if candidate.whole[each - problem.count] == candidate.whole[op - problem.count]:
                whole[each - problem.count] ^= 1
                row = _reformed(problem, row, each, bool(whole[each - problem.count]))
        candidate = replace(candidate, whole=whole)
    else:
        row = _moved(problem, row, random)
    return (candidate, [*old.rows[:rank], row, *old.rows[rank + 1 :]]) if row != old.rows[rank] else None


def _reformed(problem: Problem, row: list[int], op: int, whole: bool) -> list[int]:
    """The row with the weight gradients of the backward `op` as a part of `op`, or directly after `op` and its pair."""
    if whole:
        return [other for other in row if other != op + problem.count]
    at = row.index(op) + 1
    at += at < len(row) and row[at] < problem.count
    return [*row[:at], op + problem.count, *row[at:]]


def _moved(problem: Problem, row: list[int], random: Random) -> list[int]:
    """The row with an operation at another place, or two exchanged; each kind of a stage keeps its order."""
    first = random.randrange(len(row) - 1)
    last = min(len(row) - 1, first + 1 + int(_FARTHEST * random.random() * random.random()))
    streams = [op // problem.microbatches for op in row[first : last + 1]]  # numbers of a kind and stage
    later, earlier = streams[0] not in streams[1:], streams[-1] not in streams[:-1]
    between, luck = row[first + 1 : last], random.random()
    if luck < 0.35 and later:
        return [*row[:first], *between, row[last], row[first], *row[last + 1 :]]
    if luck < 0.7 and earlier:
        return [*row[:first], row[last], row[first], *between, *row[last + 1 :]]
    if later and earlier:
        return [*row[:first], row[last], *between, row[first], *row[last + 1 :]]
    return row
