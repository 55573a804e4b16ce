"""Recomputation in the waits of a table: sooner than within the backwards, within the bytes, with all else in its order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest

from graphpp import schedules
from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.check.step_memory import peak_bytes
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.recompute import with_recompute, without_recompute
from graphpp.schedules.search.place_weight_grads import place_weight_grads
from graphpp.schedules.search.recompute_ahead import recompute_ahead
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.step_time import StepTimes
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule

NAMED = [("1F1B", 1), ("GPipe", 1), ("ZB1P", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2), ("V-Half", 2)]


def uneven(random: Random, stages: int) -> Costs:
    """Costs of stages that recompute, or not, and whose R and backward may take longer than the backward alone."""

    def stage() -> StageCosts:
        plain = StageCosts(random.uniform(0.5, 1.5), random.uniform(0.5, 2), random.uniform(0.2, 1.5), None, 1000, 600)
        again = random.uniform(0.2, 1.0)
        longer = plain.input_grad + again * random.uniform(0.8, 1.2)
        line = replace(plain, input_grad=longer, saved_bytes=random.randint(50, 300), peak_bytes={Kind.I: 900})
        return replace(line, ahead=replace(plain, forward=again) if random.random() < 0.8 else None)

    sends = tuple(random.uniform(0, 0.4) for _ in range(stages - 1))
    return Costs((replace(stage(), ahead=StageCosts(0.5, 0.5, 0.5)), *(stage() for _ in range(stages - 1))), sends, sends[::-1])


def others(table: Schedule) -> list[list[str]]:
    return [[str(action) for action in row if action and action.kind is not Kind.R] for row in table.table]


@pytest.mark.parametrize(("name", "per_rank"), NAMED)
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize("share", [1.0, 1.5, None])
def test_no_step_is_slower_or_over_the_cap(name: str, per_rank: int, seed: int | None, share: float | None) -> None:
    stages = 4 * per_rank
    costs = Costs.unit(stages, 4, send=0.1, recompute=True) if seed is None else uneven(Random(seed), stages)
    table = SCHEDULES[name](4, stages, 8)
    if seed == 2:
        table = add_send_recv(table)
    caps = None if share is None else [int(share * nbytes) for nbytes in peak_bytes(table, costs)]
    found = recompute_ahead(table, costs, caps)
    check(found, ranks=4, stages=stages, microbatches=8)
    assert others(found) == others(table) and Schedule.parse(str(found)) == found
    assert caps is None or all(nbytes <= cap for nbytes, cap in zip(peak_bytes(found, costs), caps, strict=True))
    before, after = simulate(table, costs).makespan, simulate(found, costs).makespan
    assert after < before or found is table
    assert found == recompute_ahead(table, costs, caps)
    assert StepTimes(found).seconds(costs).makespan == pytest.approx(after)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_1f1b_recomputes_in_its_waits(ranks: int, microbatches: int) -> None:
    """With F = R and B = 2 F the cool-down has no recomputation: m(F + R + B) + (p - 1)(F + B), in the bytes of 1F1B."""
    table, costs = SCHEDULES["1F1B"](ranks, ranks, microbatches), Costs.unit(ranks, ranks, recompute=True)
    found = recompute_ahead(table, costs, peak_bytes(table, costs))
    assert simulate(table, costs).makespan == 4 * (microbatches + ranks - 1)
    assert simulate(found, costs).makespan == 4 * microbatches + 3 * (ranks - 1)


def test_an_r_moves_ahead_of_other_computations_into_a_wait() -> None:
    table, costs = SCHEDULES["V-Half"](4, 8, 8), Costs.unit(8, 4, recompute=True)
    found = recompute_ahead(table, costs)
    beside = with_recompute(table, frozenset(product(range(8), range(8))))
    assert simulate(found, costs).makespan < simulate(beside, costs).makespan < simulate(table, costs).makespan
    rows = [[action for action in row if action] for row in found.table]
    after = [(action, then) for row in rows for action, then in pairwise(row) if action.kind is Kind.R]
    assert any(_pair(action) != _pair(leaf) for action, then in after for leaf in then.leaves[-1:])


def _pair(action: Action) -> tuple[int, int | None]:
    return action.stage, action.microbatch


def test_only_marked_pairs_get_an_r() -> None:
    costs = Costs.unit(4, 4, recompute=True)
    pairs = frozenset({(0, 5), (1, 7)})
    found = recompute_ahead(replace(SCHEDULES["1F1B"](4, 4, 8), recomputed=pairs), costs)
    assert found.recomputed == pairs and found.recomputed_ahead == {(1, 7)} | ({(0, 5)} & found.recomputed_ahead)
    assert recompute_ahead(replace(found, recomputed=frozenset()), costs).recomputed_ahead == found.recomputed_ahead


def test_refusals_name_the_remedy() -> None:
    table, costs = SCHEDULES["1F1B"](2, 2, 4), Costs.unit(2, 2, recompute=True)
    with pytest.raises(ScheduleError, match=r"give StageCosts\.ahead"):
        recompute_ahead(table, Costs.unit(2, 2))
    with pytest.raises(ScheduleError, match="rank 0 of '1F1B' needs 1,100 bytes without an R: give more"):
        recompute_ahead(table, costs, 1000)
    with pytest.raises(ScheduleError, match="place recomputations first"):
        recompute_ahead(Schedule.of(["0UNSHARD 0F0 0B0 0RESHARD"]), Costs.unit(1, recompute=True))
    found = recompute_ahead(table, costs)
    with pytest.raises(ScheduleError, match=r"place weight gradients first, then call schedules\.recompute_ahead"):
        place_weight_grads(found, costs)
    for price in (simulate, peak_bytes, lambda table, costs: StepTimes(table).seconds(costs)):
        with pytest.raises(ScheduleError, match=r"give StageCosts\.ahead"):
            price(found, Costs.unit(2, 2))


def test_an_r_before_every_backward_and_none() -> None:
    pairs = frozenset(product(range(2), range(4)))
    table = SCHEDULES["ZB1P"](2, 2, 4)
    all_ahead = with_recompute(table, pairs)
    assert all_ahead.recomputed_ahead == pairs == all_ahead.recomputed
    assert without_recompute(all_ahead, pairs) == without_recompute(table, pairs)
    assert schedules.recompute_ahead is recompute_ahead
