"""Placed weight gradients: sooner than the table and within its bytes, in the table's own order of forwards and backwards."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.check.step_memory import peak_bytes
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.split_backward import split_backward
from graphpp.schedules.search.place_weight_grads import place_weight_grads
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule


def uneven(random: Random, stages: int) -> Costs:
    """Costs of which a whole backward takes less time than its halves, and whose halves need other bytes."""

    def stage() -> StageCosts:
        forward, inputs, weights = random.uniform(0.5, 1.5), random.uniform(0.5, 2), random.uniform(0.2, 1.5)
        saved = random.randint(500, 1500)
        return StageCosts(forward, inputs, weights, 0.9 * (inputs + weights), saved, random.choice((saved // 3, saved + 100)))

    sends = tuple(random.uniform(0, 0.4) for _ in range(stages - 1))
    return Costs(tuple(stage() for _ in range(stages)), sends, sends[::-1])


def order(table: Schedule) -> list[list[tuple[int, int | None, bool]]]:
    """By rank the forwards and the backwards, whole or of inputs."""
    leaves = [[leaf for action in row if action for leaf in action.leaves if leaf.kind is not Kind.W] for row in table.table]
    return [[(each.stage, each.microbatch, each.kind is Kind.F) for each in row] for row in leaves]


@pytest.mark.parametrize(
    ("name", "per_rank"), [("1F1B", 1), ("ZB1P", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2), ("ZBVZeroBubble", 2)]
)
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("share", [1.0, 1.3])
def test_no_placement_is_slower_or_over_the_cap(name: str, per_rank: int, seed: int | None, share: float) -> None:
    stages = 4 * per_rank
    costs = Costs.unit(stages, 4, send=0.1) if seed is None else uneven(Random(seed), stages)
    table = SCHEDULES[name](4, stages, 8)
    caps = [int(share * nbytes) for nbytes in peak_bytes(table, costs)]
    found = place_weight_grads(table, costs, caps)
    check(found, ranks=4, stages=stages, microbatches=8)
    assert order(found) == order(table)
    assert all(nbytes <= cap for nbytes, cap in zip(peak_bytes(found, costs), caps, strict=True))
    before, after = simulate(table, costs).makespan, simulate(found, costs).makespan
    assert after < before or found is table
    assert found == place_weight_grads(table, costs, caps)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_1f1b_reaches_zb1p_with_its_bytes(ranks: int, microbatches: int) -> None:
    costs = Costs.unit(ranks)
    plain, split = (SCHEDULES[name](ranks, ranks, microbatches) for name in ("1F1B", "ZB1P"))
    found = place_weight_grads(plain, costs, peak_bytes(split, costs), name="placed")
    assert found.name == "placed"
    assert simulate(found, costs).makespan <= simulate(split, costs).makespan < simulate(plain, costs).makespan


def test_a_table_over_the_cap_gets_a_placement_that_fits_or_an_error() -> None:
    costs, plain = Costs.unit(4), SCHEDULES["1F1B"](4, 4, 8)
    split = split_backward(plain)
    rows = (sorted(filter(None, row), key=lambda action: action.kind is Kind.W) for row in split.table)
    late = replace(split, table=tuple(map(tuple, rows)))
    caps = peak_bytes(plain, costs)
    assert max(peak_bytes(late, costs)) > max(caps)
    found = peak_bytes(place_weight_grads(late, costs, caps), costs)
    assert all(nbytes <= cap for nbytes, cap in zip(found, caps, strict=True))
    with pytest.raises(ScheduleError, match="memory_cap admits the order of '1F1B' under no placement"):
        place_weight_grads(plain, costs, [nbytes - 1 for nbytes in caps])
