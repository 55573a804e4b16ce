"""Tables of the search: conversion between actions and numbered operations, start tables, and the best of several tables.

`rows_of` takes a complete table, whose overlaps have one forward and one backward, and drops its sends and receives; `numbered`
takes a solution of the search; `schedule_of` makes the table of either. Operations are numbered as in `problem.py`, and as in
`with_messages` if messages are operations. Makespans are the simulator's; if messages occupy ranks and a table has none,
`add_send_recv` adds them first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.arguments import Home, one_by_one
from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder, operation_time, peaks
from graphpp.schedules.search.evaluate import evaluate_rows
from graphpp.schedules.search.problem import Problem, with_messages
from graphpp.schedules.search.sequence import Elements
from graphpp.schedules.table.actions import BACKWARDS, Action, Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Row, Schedule

_KINDS = (Kind.F, Kind.I, Kind.W, Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B)
_STEPS = {3: -1, 4: 1}
"""A SEND has the number of the operation that reads its value, which is of the neighbouring stage."""
_NUMBERS = {Kind.F: 0, Kind.I: 1, Kind.B: 1, Kind.W: 2}


class Numbered(NamedTuple):
    """A table in numbers: the operations of each rank, and which backwards are whole or run with a forward.

    `home[stage]`: the stage's rank. The rows have sends and receives only where a search has placed them.
    """

    candidate: Candidate
    rows: list[list[int]]
    home: tuple[int, ...]

    @property
    def actions(self) -> int:
        """The number of actions; a pair counts as one."""
        pairs = sum(self.candidate.mate(*ops) for row in self.rows for ops in pairwise(row)) if self.candidate.beside else 0
        return sum(map(len, self.rows)) - pairs

    def computations(self) -> list[list[int]]:
        """The rows without sends and receives."""
        messages = 3 * len(self.candidate.whole)
        return [[op for op in row if op < messages] for row in self.rows]


def rows_of(problem: Problem, schedule: Schedule) -> Numbered:
    rows: list[list[int]] = []
    whole, beside = bytearray(problem.count), bytearray(problem.count)
    for row in schedule.table:
        rows.append([])
        for action in (action for action in row if action and action.is_compute):
            for leaf in sorted(action.leaves, key=lambda leaf: leaf.kind is Kind.F) if action.parts else (action,):
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


def candidate_of(problem: Problem, table: Numbered) -> Candidate:
    """The order of a table's forwards and backwards; a whole backward stays whole if that saves time or bytes."""
    given, rows, _ = table
    whole = bytearray(flag and problem.prefers_whole(x // problem.microbatches) for x, flag in enumerate(given.whole))
    orders = [[op for op in row if op < 2 * problem.count] for row in rows]
    return Candidate(orders, whole, given.patience, given.beside if problem.pairs else bytearray())


def numbered(solution: EvaluatedOrder, *, join: bool) -> Numbered:
    """The operations of a solution. `join`: an I and its W become a B if no rank starts earlier because they are separate."""
    problem, candidate, count = solution.problem, solution.candidate, solution.problem.count
    joined = {op - count for row in solution.rows for op in _joinable(solution, row)} if join else set()
    whole, beside = bytearray(candidate.whole), bytearray(candidate.beside)
    for x in joined:
        whole[x] = 1
        if beside:
            beside[x] = 0  # a forward after the weight gradient ran alone
    rows = [[op for op in row if op // count != 2 or op - 2 * count not in joined] for row in solution.rows]
    return Numbered(Candidate(rows, whole, candidate.patience, beside), rows, problem.home)


def schedule_of(problem: Problem, found: Numbered, name: str) -> Schedule:
    rows = (_cells(problem, row, found.candidate) for row in found.rows)
    return Schedule(tuple(rows), problem.stages, problem.microbatches, name)


def _cells(problem: Problem, row: Sequence[int], candidate: Candidate) -> Row:
    cells: list[Action] = []
    for before, op in pairwise([-1, *row]):
        kind, x = divmod(op, problem.count)
        stage, microbatch = divmod(x, problem.microbatches)
        whole = kind == 1 and candidate.whole[x]
        cells.append(Action(stage + _STEPS.get(kind, 0), Kind.B if whole else _KINDS[kind], microbatch))
        if candidate.mate(before, op):
            forward, backward = cells.pop(), cells.pop()
            cells.append(Action(-1, Kind.OVERLAP_F_B, None, (forward, backward)))
    return tuple(cells)


def _joinable(solution: EvaluatedOrder, row: list[int]) -> list[int]:
    """Input gradients directly followed by their weight gradients, whose reader starts only after both anyway."""
    problem, candidate, ends = solution.problem, solution.candidate, solution.ends
    count, step = problem.count, problem.microbatches
    joinable = []
    for op, following in pairwise(row):
        stage = op % count // step
        if op < count or following != op + count or problem.whole[stage] > problem.took[op] + problem.took[following] + 1e-9:
            continue
        reader = op - step
        if not problem.messages and stage:  # else the SEND comes after both, or no stage reads the gradient
            if candidate.beside and candidate.beside[reader - count]:
                continue  # the reader's pair starts earlier than its own time before its end
            start = ends[reader] - operation_time(problem, candidate, reader)
            if start < ends[op] + problem.took[following] + problem.lag[reader] - 1e-9:
                continue
        joinable.append(op)
    return joinable


class Tables:
    """Tables with the placements in `homes`, by their exact makespans and bytes."""

    def __init__(self, costs: Costs, homes: Sequence[Home], microbatches: int, caps: Sequence[float]) -> None:
        self.costs, self.homes, self.microbatches, self.caps = costs, homes, microbatches, caps
        self._elements: dict[tuple[int, ...], Elements] = {}
        self._problems: dict[tuple[int, ...], Problem] = {}
        for problem in (Problem.of(costs, home, microbatches, caps) for home in homes):
            self._problems[problem.home] = with_messages(problem, costs) if costs.blocking else problem

    def named(self) -> list[Numbered]:
        """The named schedules, and one microbatch after the other, that take these counts and fit into memory."""
        tables: list[Schedule] = []
        for generator in SCHEDULES.values():
            try:
                table = generator(len(self.caps), len(self.costs.stages), self.microbatches)
            except ScheduleError:
                continue  # made for other counts
            trains = not table.kinds.isdisjoint(BACKWARDS)
            if trains and table.rank_of_stage in self.homes and table not in tables:
                tables.append(table)
        tables += [one_by_one(self.costs, home, len(self.caps), self.microbatches) for home in self.homes]
        homes = (tuple(table.rank_of_stage[stage] for stage in range(table.stages)) for table in tables)
        numbered = [rows_of(self._problems[home], table) for home, table in zip(homes, tables, strict=True)]
        return [each for each in numbered if self._fits(each)]

    def soonest(self, tables: Iterable[Numbered], name: str) -> Schedule:
        """The table that ends first, up to rounding; of several the one with the fewest bytes, then with the fewest actions."""
        complete = [self.complete(table) for table in sorted(tables, key=self._lacks_messages)]
        ends = [self.end(table) for table in complete]
        soonest = [table for end, table in zip(ends, complete, strict=True) if end <= min(ends) * (1 + 1e-9)]
        best = min(soonest, key=lambda table: (sum(self._peaks(table)), table.actions))
        return schedule_of(self._problems[best.home], best, name)

    def complete(self, table: Numbered) -> Numbered:
        """The table with its sends and receives if they occupy ranks; a table without any gets those of `add_send_recv`."""
        if not self._lacks_messages(table):
            return table
        elements = self._elements.get(table.home) or Elements.of(self._problems[table.home])
        self._elements[table.home] = elements
        return table._replace(rows=elements.rows(elements.sequence(table.rows, table.candidate)))

    def end(self, table: Numbered) -> float:
        """The makespan of a complete table; infinite if the table needs more bytes than the caps."""
        problem = self._problems[table.home]
        solution = evaluate_rows(problem, table.candidate, table.rows)
        return solution.end[0] if solution else inf

    def _lacks_messages(self, table: Numbered) -> bool:
        messages = 3 * len(table.candidate.whole)
        return self.costs.blocking and not any(op >= messages for row in table.rows for op in row)

    def _fits(self, table: Numbered) -> bool:
        return set(self.caps) == {inf} or all(peak <= cap for peak, cap in zip(self._peaks(table), self.caps, strict=True))

    def _peaks(self, table: Numbered) -> Iterator[int]:
        return peaks(self._problems[table.home], table.candidate, table.rows)
