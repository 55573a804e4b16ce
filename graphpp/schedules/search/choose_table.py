"""The tables to start from, and the choice of the best table: exact makespans and bytes.

Contract
    `Tables` knows the costs and the caps, and numbers the operations of each table once. `Tables.named` returns the named
    schedules that take the counts and fit. `Tables.soonest` chooses the table that ends first, and of several the one with the
    fewest bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from math import inf
from operator import add

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.arguments import Home, one_by_one
from graphpp.schedules.search.candidate import operation_costs, pair_costs
from graphpp.schedules.search.convert_tables import Numbered, rows_of
from graphpp.schedules.search.evaluate import evaluate_rows
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import BACKWARDS
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule


class Tables:
    """Tables with the placements in `homes`, by their exact makespans and bytes."""

    def __init__(self, costs: Costs, homes: Sequence[Home], microbatches: int, caps: Sequence[float]) -> None:
        self.costs, self.homes, self.microbatches, self.caps = costs, homes, microbatches, caps
        self._problems = [Problem.of(costs, home, microbatches, caps) for home in homes]
        self._numbered: dict[int, tuple[Schedule, Numbered]] = {}

    def named(self) -> list[Schedule]:
        """The named schedules, and one microbatch after the other, that take these counts and fit into memory."""
        tables = [one_by_one(self.costs, home, len(self.caps), self.microbatches) for home in self.homes]
        for generator in SCHEDULES.values():
            try:
                table = generator(len(self.caps), len(self.costs.stages), self.microbatches)
            except ScheduleError:
                continue  # made for other counts
            trains = not table.kinds.isdisjoint(BACKWARDS)
            if trains and table.rank_of_stage in self.homes and table not in tables:
                tables.append(table)
        return [table for table in tables if self.fits(table)]

    def soonest(self, tables: Sequence[Schedule]) -> Schedule:
        """Of the tables that end first, up to rounding, the one with the fewest bytes, then with the fewest actions."""
        ends = list(map(self.end, tables))
        least = min(ends) * (1 + 1e-9)
        soonest = [table for table, end in zip(tables, ends, strict=True) if end <= least]
        return min(soonest, key=lambda table: (sum(self.peaks(table)), sum(1 for _ in table.cells())))

    def end(self, table: Schedule) -> float:
        """The makespan of a table, as the simulator has it; infinite if the table needs more bytes than the caps."""
        if self.costs.blocking:
            return simulate(table, self.costs).makespan if self.fits(table) else inf
        problem = self.problem(table)
        numbered = self.numbered(table)
        solution = evaluate_rows(problem, numbered.candidate, numbered.rows)
        return solution.makespan * problem.unit if solution else inf

    def fits(self, table: Schedule) -> bool:
        """True if no rank ever has more bytes alive than its cap."""
        return set(self.caps) == {inf} or all(peak <= cap for peak, cap in zip(self.peaks(table), self.caps, strict=True))

    def peaks(self, table: Schedule) -> Iterator[int]:
        """The most bytes alive on each rank."""
        problem, (candidate, rows, _) = self.problem(table), self.numbered(table)
        costs = operation_costs(problem, bytes(candidate.whole))
        if candidate.beside:
            costs, _ = pair_costs(problem, candidate, rows)
        for row in rows:
            alive = accumulate(map(costs.change.__getitem__, row), initial=0)
            yield max(map(add, alive, map(costs.more.__getitem__, row)), default=0)

    def numbered(self, table: Schedule) -> Numbered:
        """The numbered operations of a table; each table is read once."""
        if id(table) not in self._numbered:
            self._numbered[id(table)] = table, rows_of(self.problem(table), table)
        return self._numbered[id(table)][1]

    def problem(self, table: Schedule) -> Problem:
        """The problem with the table's placement."""
        return self._problems[self.homes.index(dict(table.rank_of_stage))]
