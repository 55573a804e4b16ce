"""Convert between tables of actions and the numbered operations of the search.

Contract: `rows_of` and `candidate_of` take a complete table, whose overlaps are of one forward and one backward, and leave out
its sends and receives; `schedule_of` returns such a table. Operations are numbered as in `problem.py`, and as in `messages.py`
where messages are operations.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder, operation_time
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Row, Schedule

_KINDS = (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
_STEPS = {3: -1, 4: 1}
"""A SEND has the number of the operation that reads its value, which is of the neighbouring stage."""
_NUMBERS = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}


class Numbered(NamedTuple):
    """The numbered operations of a table: all of each rank, and which backwards are whole or run beside a forward.

    `home[stage]`: the stage's rank.
    """

    candidate: Candidate
    rows: list[list[int]]
    home: tuple[int, ...]


def rows_of(problem: Problem, schedule: Schedule) -> Numbered:
    """The operations of a table in its order."""
    rows: list[list[int]] = []
    whole, beside = bytearray(problem.count), bytearray(problem.count)
    for row in schedule.table:
        rows.append([])
        for action in (action for action in row if action and action.is_compute):
            for leaf in sorted(action.leaves, key=_backward_first):
                assert leaf.microbatch is not None
                x = leaf.stage * problem.microbatches + leaf.microbatch
                rows[-1].append(_NUMBERS[leaf.kind] * problem.count + x)
                if leaf.kind in (Kind.B, Kind.I):
                    whole[x], beside[x] = leaf.kind is Kind.B, bool(action.parts)
    candidate = Candidate(rows, whole, [1.0] * problem.ranks, beside if any(beside) else bytearray())
    return Numbered(candidate, rows, problem.home)


def apart(problem: Problem, candidate: Candidate) -> Candidate:
    """The candidate without its pairs, unless the search makes pairs."""
    return candidate if problem.pairs else replace(candidate, beside=bytearray())


def candidate_of(problem: Problem, numbered: Numbered) -> Candidate:
    """The order of a table's forwards and backwards; a whole backward stays whole where that saves time or bytes."""
    given, rows, _ = numbered
    whole = bytearray(
        flag and problem.prefers_whole(x // problem.microbatches) for x, flag in enumerate(given.whole)
    )
    orders = [[op for op in row if op < 2 * problem.count] for row in rows]
    return Candidate(orders, whole, given.patience, given.beside if problem.pairs else bytearray())


def _backward_first(leaf: Action) -> bool:
    return leaf.kind is Kind.F


def schedule_of(problem: Problem, solution: EvaluatedOrder, name: str, *, join: bool) -> Schedule:
    """The table of a solution. `join`: an I and its W become a B if no rank starts earlier because they are separate."""
    joined = (
        {op - problem.count for row in solution.rows for op in _joinable(problem, solution, row)} if join else set()
    )
    joined |= {x for x, whole in enumerate(solution.candidate.whole) if whole}
    rows = (_cells(problem, row, solution.candidate, joined) for row in solution.rows)
    return Schedule(tuple(rows), problem.stages, problem.microbatches, name)


def _cells(problem: Problem, row: Sequence[int], candidate: Candidate, joined: Container[int]) -> Row:
    """The actions of a row; `joined`: the backwards N + x that are whole."""
    cells: list[Action] = []
    for before, op in pairwise([-1, *row]):
        kind, x = divmod(op, problem.count)
        stage, microbatch = divmod(x, problem.microbatches)
        if kind == 1 and x in joined:
            cells.append(Action(stage, Kind.B, microbatch))
        elif kind != 2 or x not in joined:
            cells.append(Action(stage + _STEPS.get(kind, 0), _KINDS[kind], microbatch))
        if candidate.mate(before, op):
            forward, backward = cells.pop(), cells.pop()
            cells.append(Action(-1, Kind.OVERLAP_F_B, None, (forward, backward)))
    return tuple(cells)


def _joinable(problem: Problem, solution: EvaluatedOrder, row: list[int]) -> list[int]:
    """Input gradients followed at once by their weight gradients, whose reader starts only after both anyway."""
    count, step, ends = problem.count, problem.microbatches, solution.ends
    found = []
    for op, following in pairwise(row):
        stage = op % count // step
        if op < count or following != op + count or problem.whole[stage] > problem.took[op] + problem.took[following] + 1e-9:
            continue
        reader = op - step
        if problem.messages:
            found.append(op)  # the SEND stands behind both
            continue
        if stage and solution.candidate.beside and solution.candidate.beside[reader - count]:
            continue  # the reader's pair starts earlier than its own time before its end
        if (
            stage
            and ends[reader] - _time(problem, solution, reader) < _after(problem, ends[op], reader, following) - 1e-9
        ):
            continue
        found.append(op)
    return found


def _after(problem: Problem, end: float, reader: int, weight: int) -> float:
    return end + problem.took[weight] + problem.lag[reader]


def _time(problem: Problem, solution: EvaluatedOrder, op: int) -> float:
    return operation_time(problem, solution.candidate, op)
