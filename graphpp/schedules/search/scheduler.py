"""Find a schedule: the order of F, B, I and W that ends soonest within the memory of each rank.

Contract
    in    the costs of each stage, the bytes that a rank may have alive, the numbers of ranks and microbatches, and
          optionally the placement of the stages
    out   a compute-only `Schedule` that `graphpp.schedules.check.checker.check` accepts; `ScheduleError` if not even one
          microbatch fits, naming the smallest cap that would do

    1. start orders: stable patterns (`start_patterns.py`) and every named schedule, each also with its waits filled
       (`fill_waits.py`)
    2. the best of them are improved by local search (`local_search.py`), the most promising ones longest, and the two best
       by moving single operations, weight gradients included (`move_single.py`)
    3. where a forward beside a backward takes less time than both alone (`Costs.overlap` < 1), steps 1 and 2 run a second time
       with such pairs; the tables without pairs are starts there, so the result is never behind them
    4. the exact times of the results and of the named schedules are compared; the one that ends soonest wins

Equal arguments give an equal table on every machine: the search counts steps, not seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from random import Random

from graphpp.arguments import COUNT, INTEGER, NUMBER, TEXT, Accepted, checked
from graphpp.errors import ScheduleError
from graphpp.progress import working
from graphpp.schedules.check.checker import check
from graphpp.schedules.check.peak_memory import peak_bytes
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.arguments import (
    Home,
    caps_of,
    check_size,
    one_by_one,
    placements,
    too_tight,
)
from graphpp.schedules.search.convert_tables import candidate_of, rows_of, schedule_of
from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder
from graphpp.schedules.search.evaluate import evaluate_order, evaluate_rows
from graphpp.schedules.search.fill_waits import fill_waits
from graphpp.schedules.search.local_search import local_search
from graphpp.schedules.search.move_single import move_single
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.start_patterns import start_patterns
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import BACKWARDS
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule

Found = tuple[Problem, EvaluatedOrder]

_EFFORT, _MOST_STEPS = 1_000_000, 20_000
"""Search steps times forwards, which take a few seconds; and the most steps, since small problems need fewer."""
_ROUNDS = (6, 3, 1)
"""The number of solutions that continue in each round; all rounds take the same number of steps."""
_FILLED, _WINDOWS = 16, (3, 8)
"""The number of solutions whose waits are filled, and the numbers of operations that `fill_waits` looks at."""
_FILL_EFFORT = 80_000
"""Forwards of all the solutions whose waits are filled; at least two are."""


_TIMES = Accepted("a number from 0 to 1000", lambda value: NUMBER.accepts(value) and 0 <= value <= 1000)  # type: ignore[operator]


@checked(ScheduleError, costs=COSTS, ranks=COUNT, microbatches=COUNT, seed=INTEGER, effort=_TIMES, name=TEXT)
def schedule_auto(
    costs: Costs,
    memory_cap: int | Sequence[int] | None = None,
    *,
    ranks: int,
    microbatches: int,
    placement: str | Home | None = None,
    seed: int = 0,
    effort: float = 1.0,
    name: str = "searched",
) -> Schedule:
    """Search the best order of F, B, I and W for these costs under `memory_cap` bytes, for all ranks or one per rank.

    `placement`: "loop" (rank r holds r, r + ranks, ...), "v" (down the ranks and up again), a mapping stage -> rank, or None:
    the better of loop and v. `effort` multiplies the number of search steps; another `seed` takes other steps. Of several
    tables that end first, the one with the fewest bytes is returned. No named schedule that fits is better than the result.
    With `costs.overlap` < 1 the table may have OVERLAP_F_B of one forward and one backward.

    Raises `ScheduleError` if the caps admit no schedule, naming the smallest that do, and for counts that do not fit.
    """
    check_size(ranks, microbatches)
    caps = caps_of(memory_cap, ranks)
    homes = placements(len(costs.stages), placement, ranks)
    tables = [table for table in _fitting(costs, microbatches, caps, homes) if table.rank_of_stage in homes]
    if not tables:
        raise too_tight(costs, homes, caps)
    with working("searching a schedule"):
        for each in (replace(costs, overlap=1.0), costs) if costs.overlap < 1 else (costs,):
            problems = [Problem.of(each, home, microbatches, caps) for home in homes]
            tables += _searched(problems, tables, Random(seed), effort)
        best = _soonest(tables, costs, caps)
    check(best, ranks=ranks, stages=len(costs.stages), microbatches=microbatches)
    return Schedule(best.table, best.stages, microbatches, name)


def _soonest(tables: Sequence[Schedule], costs: Costs, caps: Sequence[float]) -> Schedule:
    """Of the tables that end first, up to rounding, the one with the fewest bytes, then with the fewest actions."""
    ends = [_end_within(table, costs, caps) for table in tables]
    least = min(ends) * (1 + 1e-9)
    soonest = [table for table, end in zip(tables, ends, strict=True) if end <= least]
    return min(soonest, key=lambda table: (sum(peak_bytes(table, costs)), sum(1 for _ in table.cells())))


def _end_within(table: Schedule, costs: Costs, caps: Sequence[float]) -> float:
    """The simulated makespan of a table; infinite if it needs more bytes than the caps."""
    if costs.blocking:  # `Problem` only estimates messages that occupy ranks
        fits = all(peak <= cap for peak, cap in zip(peak_bytes(table, costs), caps, strict=True))
        return simulate(table, costs).makespan if fits else inf
    problem = Problem.of(costs, table.rank_of_stage, table.microbatches, caps)
    solution = evaluate_rows(problem, *rows_of(problem, table))
    return solution.makespan * problem.unit if solution else inf


# ---------------------------------------------------------------------------------- the search


def _fitting(costs: Costs, microbatches: int, caps: Sequence[float], homes: Sequence[Home]) -> list[Schedule]:
    """The named schedules, and one microbatch after the other, that take these counts and fit into memory."""
    ranks = len(caps)
    tables = [one_by_one(costs, home, ranks, microbatches) for home in homes]
    for generator in SCHEDULES.values():
        try:
            table = generator(ranks, len(costs.stages), microbatches)
        except ScheduleError:
            continue  # made for other counts
        if table not in tables and not table.kinds.isdisjoint(BACKWARDS):
            tables.append(table)
    return [
        table for table in tables if all(peak <= cap for peak, cap in zip(peak_bytes(table, costs), caps, strict=True))
    ]


def _searched(problems: Sequence[Problem], tables: Sequence[Schedule], random: Random, effort: float) -> list[Schedule]:
    """Tables for the problems, which differ in their placement, found from patterns and from the given tables."""
    starts: list[Found] = []
    for problem in problems:
        alike = [table for table in tables if tuple(table.rank_of_stage[s] for s in range(problem.stages)) == problem.home]
        starts += [(problem, solution) for solution in _starts(problem, alike, random)]
    found = _improved(starts, effort, random)
    # Blocking messages are only estimated, so more tables are compared.
    more = starts if problems[0].blocking else []
    return [
        *(schedule_of(*each, "searched", join=join) for each in found for join in (False, True)),
        *(schedule_of(*each, "searched", join=True) for each in more),
    ]


def _starts(problem: Problem, tables: Sequence[Schedule], random: Random) -> list[EvaluatedOrder]:
    """Solutions to start the search from, with different values, the best first."""
    given = [candidate_of(problem, table) for table in tables]
    known = _best(problem, given, _FILLED)
    for whole in _wholes(problem):
        known += _best(problem, start_patterns(problem, whole, random), _FILLED)
    most = max(2, _FILL_EFFORT // problem.count)
    filled = (fill_waits(problem, each.candidate, window) for each in _best_of(known, most) for window in _WINDOWS)
    return _different(known + _best(problem, filled, _ROUNDS[0]), _ROUNDS[0])


def _wholes(problem: Problem) -> list[bytearray]:
    """The backwards that are whole at the start: those that need fewer bytes so; in a second choice also the faster ones."""
    stages = range(problem.stages)
    choices = {tuple(problem.kept[stage] > problem.saved[stage] for stage in stages)}
    choices.add(tuple(problem.prefers_whole(stage) for stage in stages))
    choices.add(tuple(map(problem.needs_less_whole, stages)))
    return [bytearray(flag for flag in choice for _ in range(problem.microbatches)) for choice in sorted(choices)]


def _best(problem: Problem, candidates: Iterable[Candidate], most: int) -> list[EvaluatedOrder]:
    """The best of the candidates that can run; stops at the first one that reaches the lower bound."""
    found: list[EvaluatedOrder] = []
    bound = problem.bound() * (1 + 1e-9)
    for candidate in candidates:
        limit = 1.02 * found[-1].value if len(found) == most else inf
        solution = evaluate_order(problem, candidate, limit)
        if solution:
            found = _different([*found, solution], most)
        if found and found[0].makespan <= bound:
            break
    return found


def _best_of(solutions: Sequence[EvaluatedOrder], most: int) -> list[EvaluatedOrder]:
    return sorted(solutions, key=lambda each: (each.makespan, each.value))[:most]


def _different(solutions: Iterable[EvaluatedOrder], most: int) -> list[EvaluatedOrder]:
    """The best solutions, one for each pair of makespan and value; solutions equal in both are most often the same table."""
    kept = {(round(each.makespan, 6), round(each.value, 6)): each for each in solutions}
    return [kept[key] for key in sorted(kept)][:most]


def _improved(starts: list[Found], effort: float, random: Random) -> list[Found]:
    """In every round fewer solutions are searched, each for longer. The best comes first."""
    found = sorted(starts, key=_end)
    for width in _ROUNDS if found else ():
        found = found[:width]
        if any(solution.makespan <= problem.bound() * (1 + 1e-9) for problem, solution in found):
            break
        steps = int(min(_MOST_STEPS, _EFFORT / found[0][0].count) * effort / len(_ROUNDS) / width)
        found = sorted(((problem, local_search(problem, each, steps, random)) for problem, each in found), key=_end)
    if not found:
        return []
    steps = int(min(_MOST_STEPS, _EFFORT / found[0][0].count) * effort / 2)
    found = found[:2]
    return found + [(problem, move_single(problem, each, steps, random)) for problem, each in found]


def _end(found: Found) -> float:
    problem, solution = found
    return solution.makespan * problem.unit
