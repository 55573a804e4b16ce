"""Find a schedule: the order of F, B, I and W that ends soonest within the memory of each rank.

- Start orders are stable patterns (`start_patterns.py`) and every named schedule, each also with its waits filled
  (`fill_waits.py`).
- Local search improves the best of them (`local_search.py`), the most promising ones longest: first by shifting pieces of
  microbatches, then by moving single operations, weight gradients included (`move_elements.py`). If messages occupy ranks
  (`Costs.blocking`), the first search estimates them, and the second gives sends and receives places of their own. The best
  result is also moved towards fewer bytes.
- A free placement is searched first (`free_placement.py`), and the best ones get a search of their own.
- If overlapping a forward and a backward saves time (`Costs.saves`), both searches run again with such pairs, starting
  from the tables without pairs too, so the result is never worse.
- The table with the least exact time wins, named schedules included (`tables.py`). The result passes `check`; it has sends and
  receives only if they occupy ranks. Equal arguments give an equal table: the search counts steps, not seconds.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from math import inf
from random import Random

from graphpp.arguments import COUNT, INTEGER, NUMBER, TEXT, Accepted, checked
from graphpp.errors import ScheduleError
from graphpp.progress import working
from graphpp.schedules.check.checker import check
from graphpp.schedules.search.arguments import Home, caps_of, check_size, placements, too_tight
from graphpp.schedules.search.candidate import Candidate, EvaluatedOrder
from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.evaluate_sequence import Sequenced, sequences
from graphpp.schedules.search.fill_waits import fill_waits
from graphpp.schedules.search.free_placement import Placed, PlacementSearch
from graphpp.schedules.search.local_search import Shifts, distinct, search_in_rounds
from graphpp.schedules.search.move_elements import Moves, save_bytes
from graphpp.schedules.search.problem import Problem, with_messages
from graphpp.schedules.search.sequence import Elements
from graphpp.schedules.search.start_patterns import start_patterns
from graphpp.schedules.search.tables import Numbered, Tables, apart, candidate_of, numbered
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule

_EFFORT, _MOST_STEPS = 1_000_000, 20_000
"""Steps of the first search times forwards, which take a few seconds; and the most steps, since small problems need fewer."""
_MORE_MOVES, _MOST_MOVED = 2, 3_333
"""The second search takes twice as many steps, but only for at most this many forwards: else the steps are too few."""
_RESULTS, _SAVING = 3, 0.05
"""The number of the second search's sequences that become tables; its extra steps that save bytes, as a fraction."""
_STARTS = 6
"""The number of solutions from which the first search starts."""
_FILLED, _WINDOWS = 16, (3, 8)
"""The number of solutions whose waits are filled, and the numbers of operations that `fill_waits` looks at."""
_FILL_EFFORT = 80_000
"""Forwards of all the solutions whose waits are filled, or whose messages get places; at least two solutions are taken."""
_MAPPED, _MAPPINGS = 30_000, 3
"""Forwards of the quick orders by which placements are compared; and the number of placements whose orders are searched."""

_EFFORTS = Accepted("a number from 0 to 1000", lambda value: NUMBER.accepts(value) and 0 <= value <= 1000)  # type: ignore[operator]


@checked(ScheduleError, costs=COSTS, ranks=COUNT, microbatches=COUNT, seed=INTEGER, effort=_EFFORTS, name=TEXT)
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

    `placement`: "loop" (rank r has r, r + ranks, ...), "v" (down the ranks and up again), a mapping stage -> rank, None: the
    better of loop and v, or "free": any mapping that the search finds, under which ranks may have unlike numbers of stages, or
    none; its table ends no later than that of None. `effort` multiplies the number of search steps; another `seed` takes other
    steps. Of several tables that end first, the one with the fewest bytes is returned. No named schedule that fits and has a
    placement that is searched is better than the result. With `costs.saves` the table may have OVERLAP_F_B; with
    `costs.blocking` it has sends and receives, else none. Raises `ScheduleError` if the caps admit no schedule, naming the
    smallest that do, and for counts that do not fit.
    """
    check_size(ranks, microbatches)
    caps = caps_of(memory_cap, ranks)
    homes = placements(len(costs.stages), placement, ranks)
    with paused_collector(), working("searching a schedule"):
        placed = _free(costs, homes, microbatches, caps, effort) if placement == "free" else {}
        free = [dict(enumerate(home)) for home in placed]
        tables = Tables(costs, [*homes, *free], microbatches, caps)
        found = tables.named() + [numbered(order, join=False) for order in placed.values()]
        if not found:
            raise too_tight(costs, [*homes, *free], caps)
        for some in filter(None, (homes, free)):  # apart, so that the first result is that of placement=None
            found += _for_all_overlaps(tables, some, found, seed, effort)
        best = tables.soonest(found, name)
    check(best, ranks=ranks, stages=len(costs.stages), microbatches=microbatches)
    return best


def improved(order: EvaluatedOrder, costs: Costs, caps: Sequence[float], effort: float, name: str) -> Schedule | None:
    """The best table with the placement of an order that the search finds from this order too; None if the caps admit none."""
    home = dict(enumerate(order.problem.home))
    with paused_collector():
        tables = Tables(costs, [home], order.problem.microbatches, caps)
        found = tables.named()
        if not found:
            return None
        found += [numbered(order, join=False)]
        best = tables.soonest(found + _for_all_overlaps(tables, [home], found, 0, effort), name)
    check(best, ranks=len(caps), stages=len(costs.stages), microbatches=order.problem.microbatches)
    return best


def _for_all_overlaps(
    tables: Tables, homes: Sequence[Home], given: Sequence[Numbered], seed: int, effort: float
) -> list[Numbered]:
    """Tables with these placements, without overlaps, and from them with overlaps if these save time."""
    costs, found = tables.costs, list[Numbered]()
    for each in (replace(costs, overlap=1.0, hidden=0.0), costs) if costs.saves else (costs,):
        problems = [Problem.of(each, home, tables.microbatches, tables.caps) for home in homes]
        found += _searched(problems, [*given, *found], each, Random(seed), effort)
    return found


def _free(
    costs: Costs, homes: Sequence[Home], microbatches: int, caps: Sequence[float], effort: float
) -> dict[tuple[int, ...], EvaluatedOrder]:
    """The best placements that differ from `homes`, with an order of each."""
    search = PlacementSearch(costs, len(caps), microbatches, lambda placed: costs, lambda placed: caps)
    cut = tuple(range(len(costs.stages)))
    starts = [Placed(cut, tuple(home[stage] for stage in cut)) for home in homes]
    found = search.best(map(search.start, [*starts, search.in_a_row()]), _MAPPED * effort)
    orders = {each.placed.home: each.order for each in found if each.order and dict(enumerate(each.placed.home)) not in homes}
    return dict(islice(orders.items(), _MAPPINGS))


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause the collection of reference cycles: the search makes millions of tuples and hardly any cycle."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _searched(
    problems: Sequence[Problem], given: Sequence[Numbered], costs: Costs, random: Random, effort: float
) -> list[Numbered]:
    """Tables for the problems, which differ in their placement, found from patterns and from the given tables."""
    starts: list[EvaluatedOrder] = []
    for problem in problems:
        starts += _starts(problem, [each for each in given if each.home == problem.home], random)
    steps = min(_MOST_STEPS, _EFFORT / problems[0].count) * effort
    orders = search_in_rounds(starts, steps, lambda order: Shifts(order.problem, random))
    placed = distinct(_as_sequences(problems, [*orders, *starts], given, costs))
    if placed and problems[0].count <= _MOST_MOVED:
        moved = search_in_rounds(placed, _MORE_MOVES * steps, lambda sequence: Moves(sequence.elements, random))
        placed = [save_bytes(moved[0], int(_SAVING * _MORE_MOVES * steps), random), *moved]
    solutions = [*(orders if not costs.blocking else []), *(each.solution for each in placed[:_RESULTS])]
    return [numbered(each, join=join) for each in solutions for join in (False, True)]


def _as_sequences(
    problems: Sequence[Problem], orders: Sequence[EvaluatedOrder], given: Sequence[Numbered], costs: Costs
) -> Iterator[Sequenced]:
    """The solutions as sequences; if messages occupy ranks, the given tables too, since solutions only estimate messages."""
    for problem in problems:
        if not costs.blocking and problem.count > _MOST_MOVED:
            continue
        elements = Elements.of(with_messages(problem, costs) if costs.blocking else problem)
        most = max(2, _FILL_EFFORT // problem.count)
        own = {id(each): (each.candidate, each.rows) for each in [each for each in orders if each.problem is problem][:most]}
        named = [(each.candidate, each.computations()) for each in given if costs.blocking and each.home == problem.home]
        for candidate, rows in (*own.values(), *named[:most]):
            yield from sequences(elements, apart(problem, candidate), rows)


def _starts(problem: Problem, given: Sequence[Numbered], random: Random) -> list[EvaluatedOrder]:
    """Solutions to start the search from, with different makespans or totals, the best first."""
    most = max(2, _FILL_EFFORT // problem.count)
    keep = min(_FILLED, max(_STARTS, most))
    known = _best(problem, (candidate_of(problem, each) for each in given), keep)
    for whole in _wholes(problem):
        known += _best(problem, start_patterns(problem, whole, random), keep)
    best = sorted(known, key=lambda each: each.end)[:most]
    filled = (fill_waits(problem, each.candidate, window) for each in best for window in _WINDOWS)
    return distinct(known + _best(problem, filled, _STARTS))[:_STARTS]


def _wholes(problem: Problem) -> list[bytearray]:
    """The choices of whole backwards at the start: those that need fewer bytes, and also the faster ones."""
    stages = range(problem.stages)
    choices = {tuple(problem.kept[stage] > problem.saved[stage] for stage in stages)}
    choices.add(tuple(problem.prefers_whole(stage) for stage in stages))
    choices.add(tuple(map(problem.needs_less_whole, stages)))
    return [bytearray(flag for flag in choice for _ in range(problem.microbatches)) for choice in sorted(choices)]


def _best(problem: Problem, candidates: Iterable[Candidate], most: int) -> list[EvaluatedOrder]:
    """The best of the candidates that can run; stops at one that reaches the lower bound."""
    found: list[EvaluatedOrder] = []
    for candidate in candidates:
        limit = 1.02 * found[-1].total if len(found) == most else inf
        solution = evaluate_order(problem, candidate, limit)
        if solution:
            found = distinct([*found, solution])[:most]
        if found and found[0].is_optimal:
            break
    return found
