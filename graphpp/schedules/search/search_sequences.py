"""Search sequences: start from evaluated orders, and move single elements; messages included where they occupy ranks.

Contract
    in    complete rows of computations to start from
    out   the best sequences found, the best first; equal for equal arguments on every machine
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from random import Random

from graphpp.schedules.search.candidate import Candidate
from graphpp.schedules.search.evaluate_sequence import Sequenced, evaluate_sequence
from graphpp.schedules.search.move_elements import move_elements
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.save_bytes import save_bytes
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
