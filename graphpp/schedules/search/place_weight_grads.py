"""Move the weight gradients of a table: each into a wait of its rank, or where an operation needs its bytes.

The result ends sooner within the bytes, and every rank runs its forwards and backwards in the given order; it is the given
table if none ends sooner. `ScheduleError` if neither fits. Backwards are whole as given, split behind a rank's last forward or
only towards its end, or all split; a split one whose halves need not be apart becomes whole again. `evaluate.py` places the
weight gradients, with several thresholds for the length of a wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf

from graphpp.arguments import checked
from graphpp.errors import ScheduleError
from graphpp.schedules.search.arguments import caps_of
from graphpp.schedules.search.candidate import Candidate
from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.tables import Numbered, Tables, candidate_of, numbered, rows_of
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import SCHEDULE, Schedule

_PATIENCE = (1.0, 0.5, 0.0)
_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the backwards after the last forward; with few bytes, only the last ones fit
_KEPT = 3  # placements whose exact ends are compared


@checked(ScheduleError, table=SCHEDULE, costs=COSTS)
def place_weight_grads(
    table: Schedule, costs: Costs, memory_cap: int | Sequence[int] | None = None, *, name: str | None = None
) -> Schedule:
    """The table, or a sooner one called `name` within `memory_cap` bytes, with its messages if they occupy ranks."""
    if table.recomputed_ahead:
        raise ScheduleError(f"{table.name!r} has an R: place weight gradients first, then call schedules.recompute_ahead")
    home, caps = table.rank_of_stage, caps_of(memory_cap, table.ranks)
    problem = Problem.of(costs, home, table.microbatches, caps)
    tables, given = Tables(costs, [home], table.microbatches, caps), rows_of(problem, table)

    def end(each: Numbered) -> float:
        return tables.end(tables.complete(each))

    before = end(given)
    sooner = [each for each in _placed(problem, given) if end(each) < before * (1 - 1e-9)]
    if sooner:
        return tables.soonest(sooner, name or table.name)
    if before == inf:
        raise ScheduleError(f"memory_cap admits the order of {table.name!r} under no placement of its weight gradients")
    return table


def _placed(problem: Problem, given: Numbered) -> Iterator[Numbered]:
    solutions = filter(None, (evaluate_order(problem, candidate) for candidate in _candidates(problem, given)))
    for solution in sorted(solutions, key=lambda solution: solution.end)[:_KEPT]:
        yield from (numbered(solution, join=join) for join in (True, False))


def _candidates(problem: Problem, given: Numbered) -> Iterator[Candidate]:
    """The order of forwards and backwards, with every choice of whole backwards and of patience."""
    order = candidate_of(problem, given)
    split = [_split_at_the_end(problem, order, share) for share in _SHARES]
    for whole in dict.fromkeys(map(bytes, (given.candidate.whole, *split, bytes(problem.count)))):
        for patience in _PATIENCE:
            yield Candidate(order.orders, bytearray(whole), [patience] * problem.ranks, order.beside)


def _split_at_the_end(problem: Problem, order: Candidate, share: float) -> bytearray:
    """The backwards that stay whole if each rank splits this share of the backwards behind its last forward, the last ones."""
    whole = bytearray(problem.count)
    for row in order.orders:
        last = max((at for at, op in enumerate(row) if op < problem.count), default=0)
        for op in row[: len(row) - round(share * (len(row) - last))]:
            if op >= problem.count:
                whole[op - problem.count] = 1
    return whole
