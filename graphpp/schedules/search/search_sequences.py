"""Search sequences: start from evaluated orders, and move single elements; messages included where they occupy ranks.

Contract
    in    complete rows of computations to start from
    out   the best sequences found, the best first; equal for equal arguments on every machine

`save_bytes` moves elements so that the ranks need fewer bytes, and the sequence ends as soon as before. Few steps make a rank's
peak lower, so of sequences with equal peaks one that has fewer bytes alive after its operations is taken: it is on the way to
lower peaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from random import Random

from graphpp.schedules.search.candidate import Candidate, operation_costs, pair_costs, peaks
from graphpp.schedules.search.evaluate_sequence import Sequenced, evaluate_sequence
from graphpp.schedules.search.move_elements import Moves, move_elements
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.sequence import Elements

_EFFORT, _MOST_STEPS, _FEWEST_STEPS = 2_000_000, 40_000, 600
"""Search steps times forwards; the most steps, since small problems need fewer; and the fewest, below which none is taken."""
_RESULTS, _SAVING = 2, 0.05
"""The number of sequences that are returned, and the steps that save bytes as a share of the others."""
_ROUNDS = (6, 3, 1)
"""The number of sequences that continue in each round; all rounds take the same number of steps."""


def is_worth_moving(problem: Problem) -> bool:
    """True if there are steps enough for the problem's size."""
    return min(_MOST_STEPS, _EFFORT / problem.count) >= _FEWEST_STEPS


def search_sequences(starts: Iterable[Sequenced], random: Random, effort: float) -> list[Sequenced]:
    """In every round fewer sequences are searched, each for longer. Of the best one there is also a form with fewer bytes."""
    found = _different(starts)
    if not found or not is_worth_moving(found[0].elements.problem):
        return found[:_RESULTS]
    steps = min(_MOST_STEPS, _EFFORT / found[0].elements.problem.count) * effort
    for width in _ROUNDS if not found[0].is_optimal else ():
        each = int(steps / len(_ROUNDS) / width)
        found = _different(move_elements(one, each, random) for one in found[:width])
    return [save_bytes(found[0], int(_SAVING * steps), random), *found[:_RESULTS]]


def sequences(elements: Elements, candidate: Candidate, rows: Sequence[list[int]]) -> Iterator[Sequenced]:
    """The sequences of rows of computations: messages stand as `add_send_recv` has them, and by time early and late."""
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


def _different(found: Iterable[Sequenced]) -> list[Sequenced]:
    """The best sequences, one for each pair of makespan and value; sequences equal in both are most often the same table."""
    kept = {(float(f"{each.value[0]:.9g}"), float(f"{each.value[1]:.9g}")): each for each in found}
    return [kept[key] for key in sorted(kept)]


def save_bytes(start: Sequenced, steps: int, random: Random) -> Sequenced:
    """Take `steps` steps of `move_elements`; the result ends no later, and its ranks need no more bytes in sum."""
    moves = Moves(start.elements, random)
    latest = start.makespan * (1 + 1e-10)
    best, least = start, _bytes(start)
    for _ in range(steps):
        neighbour = moves.neighbour(best)
        found = neighbour and evaluate_sequence(start.elements, *neighbour, 2 * latest, best)
        if found and found.makespan <= latest:
            needed = _bytes(found)
            if needed <= least:
                best, least = found, needed
    return best


def _bytes(found: Sequenced) -> tuple[int, int]:
    """The sum of the ranks' peaks, and the sum of the bytes alive after each operation."""
    problem, candidate, rows = found.elements.problem, found.candidate, found.solution.orders
    costs = pair_costs(problem, candidate, rows)[0] if candidate.beside else operation_costs(problem, bytes(candidate.whole))
    alive = sum(sum(accumulate(map(costs.change.__getitem__, row))) for row in rows)
    return sum(peaks(problem, candidate, rows)), alive
