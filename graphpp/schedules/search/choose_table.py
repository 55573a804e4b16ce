"""The tables to start from, and the choice of the best table: exact makespans and bytes.

Contract
    `Tables` knows the costs and the caps. `Tables.named` returns the numbered operations of the named schedules that take the
    counts and fit. `Tables.soonest` chooses the table that ends first, and of several the one with the fewest bytes. The
    makespans are the simulator's; where messages occupy ranks and a table has none, they are those of the table that
    `add_send_recv` makes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.arguments import Home, one_by_one
from graphpp.schedules.search.candidate import peaks
from graphpp.schedules.search.convert_tables import Numbered, rows_of, schedule_of
from graphpp.schedules.search.evaluate import evaluate_rows
from graphpp.schedules.search.problem import Problem, with_messages
from graphpp.schedules.search.sequence import Elements
from graphpp.schedules.table.actions import BACKWARDS
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule


class Tables:
    """Tables with the placements in `homes`, by their exact makespans and bytes."""

    def __init__(self, costs: Costs, homes: Sequence[Home], microbatches: int, caps: Sequence[float]) -> None:
        self.costs, self.homes, self.microbatches, self.caps = costs, homes, microbatches, caps
        self._elements: dict[tuple[int, ...], Elements] = {}
        self._problems: dict[tuple[int, ...], Problem] = {}
        self._silent: dict[tuple[int, ...], Problem] = {}
        silent = replace(costs, blocking=False, sends_forward=(), sends_backward=())
        for problem in (Problem.of(costs, home, microbatches, caps) for home in homes):
            self._problems[problem.home] = with_messages(problem, costs) if costs.blocking else problem
            self._silent[problem.home] = Problem.of(silent, dict(enumerate(problem.home)), microbatches, caps)

    def named(self) -> list[Numbered]:
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
        homes = (tuple(table.rank_of_stage[stage] for stage in range(table.stages)) for table in tables)
        numbered = [rows_of(self._problems[home], table) for home, table in zip(homes, tables, strict=True)]
        return [each for each in numbered if self._fits(each)]

    def soonest(self, tables: Iterable[Numbered], name: str) -> Schedule:
        """Of the tables that end first, up to rounding, the one with the fewest bytes, then with the fewest actions."""
        ends, least = list[tuple[float, Numbered]](), inf
        for table in sorted(tables, key=self._lacks_messages):
            if not self._lacks_messages(table) or self._earliest_end(table, least) <= least:
                complete = self.complete(table)
                ends.append((self.end(complete), complete))
                least = min(least, ends[-1][0] * (1 + 1e-9))
        soonest = [table for end, table in ends if end <= least]
        best = min(soonest, key=lambda table: (sum(self._peaks(table)), table.actions))
        return schedule_of(self._problems[best.home], best, name)

    def complete(self, table: Numbered) -> Numbered:
        """The table with its sends and receives where they occupy ranks; a table without any gets those of `add_send_recv`."""
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

    def _earliest_end(self, table: Numbered, limit: float) -> float:
        """The makespan of a table if its messages took no time; infinite if that is above `limit`."""
        problem = self._silent[table.home]
        solution = evaluate_rows(problem, table.candidate, table.rows, 2 * limit / problem.unit)
        return solution.end[0] if solution else inf

    def _fits(self, table: Numbered) -> bool:
        """True if no rank ever has more bytes alive than its cap."""
        return set(self.caps) == {inf} or all(peak <= cap for peak, cap in zip(self._peaks(table), self.caps, strict=True))

    def _peaks(self, table: Numbered) -> Iterator[int]:
        """The most bytes alive on each rank."""
        return peaks(self._problems[table.home], table.candidate, table.rows)
