"""Move elements of a sequence so that its ranks need fewer bytes, and it ends as soon as before.

Contract
    in    a `Sequenced`, how many steps to take, and a source of randomness
    out   a `Sequenced` that ends no later and whose ranks need no more bytes in sum; equal for equal arguments on every machine

A step is one of `move_elements`. Few steps make a rank's peak lower, so of sequences with equal peaks one that has fewer bytes
alive after its operations is taken: it is on the way to lower peaks.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random

from graphpp.schedules.search.candidate import operation_costs, pair_costs, peaks
from graphpp.schedules.search.evaluate_sequence import Sequenced, evaluate_sequence
from graphpp.schedules.search.move_elements import Moves


def save_bytes(start: Sequenced, steps: int, random: Random) -> Sequenced:
    """Take `steps` steps."""
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
