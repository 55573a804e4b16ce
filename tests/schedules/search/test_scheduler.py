"""The scheduler's tables: at or below the published makespans, within their bytes, and never worse than a named schedule.

The bars are the makespans of the zero-bubble authors' own generators at unit costs (F = I = W = 1 per rank and
microbatch), in units of one rank's microbatch; the caps are their peaks.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphpp
from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.search.candidate import EvaluatedOrder
from graphpp.schedules.search.evaluate import evaluate_order
from graphpp.schedules.search.fill_waits import fill_waits
from graphpp.schedules.search.free_placement import Placed, PlacementSearch
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.search.start_patterns import start_patterns
from graphpp.schedules.search.tables import numbered, schedule_of
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples, further


def peaks(schedule: Schedule, costs: Costs) -> list[int]:
    timeline = simulate(schedule, costs)
    return [timeline.peak_bytes(rank) for rank in range(schedule.ranks)]


def random_costs(random: Random, stages: int) -> Costs:
    def stage() -> StageCosts:
        forward, inputs, weights = random.uniform(0.5, 1.5), random.uniform(0.5, 2), random.uniform(0.2, 1.5)
        whole = random.choice((None, random.uniform(0.7, 1.1) * (inputs + weights)))
        saved = random.randint(500, 1500)
        return StageCosts(forward, inputs, weights, whole, saved, random.choice((None, saved // 3, saved + 100)))

    sends = tuple(random.uniform(0, 0.4) for _ in range(stages - 1))
    return Costs(tuple(stage() for _ in range(stages)), *random.choice((((), ()), (sends, sends[::-1]))))


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("ranks", "microbatches", "chunks", "cap", "bar"),
    [
        pytest.param(4, 8, 1, 4, 27, id="ZB1P 4x8"),
        pytest.param(4, 8, 1, 8, 27, id="ZB2P 4x8"),
        pytest.param(4, 8, 2, 4, 25.5, id="ZBV 4x8"),
        pytest.param(4, 8, 2, 3, 26.5, id="V-Half 4x8"),
        pytest.param(4, 8, 2, 2, 29.5, id="V-Min 4x8"),
        pytest.param(4, 16, 1, 4, 51, id="ZB1P 4x16"),
        pytest.param(8, 16, 1, 8, 55, id="ZB1P 8x16"),
        pytest.param(8, 16, 2, 8, 51.5, id="ZBV 8x16"),
        pytest.param(8, 16, 2, 5, 56.5, id="V-Half 8x16"),
        pytest.param(8, 16, 2, 4, 61.5, id="V-Min 8x16"),
    ],
)
def test_unit_costs(ranks: int, microbatches: int, chunks: int, cap: int, bar: float) -> None:
    costs = Costs.unit(ranks * chunks, ranks)
    schedule = schedule_auto(costs, 1000 * cap, ranks=ranks, microbatches=microbatches, placement="v", effort=0.2)
    timeline = simulate(schedule, costs)
    assert timeline.makespan <= bar + 1e-9
    assert max(peaks(schedule, costs)) <= 1000 * cap


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (3, 7), (6, 12), (3, 3)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_with_enough_memory_only_the_way_to_the_last_rank_is_lost(ranks: int, microbatches: int, chunks: int) -> None:
    """The last rank starts when the first microbatch reaches it, and never waits after that."""
    costs = Costs.unit(ranks * chunks, ranks)
    schedule = schedule_auto(costs, ranks=ranks, microbatches=microbatches)
    assert simulate(schedule, costs).makespan == pytest.approx(3 * microbatches + (ranks - 1) / chunks)


@settings(max_examples=examples(30), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 7))
def test_never_behind_a_named_schedule_and_legal(seed: int, ranks: int, chunks: int, microbatches: int) -> None:
    random, stages = Random(seed), ranks * chunks
    costs = replace(random_costs(random, stages), blocking=random.random() < 0.3, overhead=random.choice((0, 0.1)))
    least = max(sum(each.saved_bytes for each in costs.stages[rank::ranks]) for rank in range(ranks))
    cap = random.choice((None, least, 2 * least, 4 * least))
    schedule = schedule_auto(costs, cap, ranks=ranks, microbatches=microbatches, effort=0.03)
    check(schedule, ranks=ranks, stages=stages, microbatches=microbatches)
    assert schedule.has_communication == (costs.blocking and ranks > 1)
    sent = schedule if schedule.has_communication else add_send_recv(schedule)
    check(sent, ranks=ranks, stages=stages, microbatches=microbatches)
    assert cap is None or max(peaks(schedule, costs)) <= cap
    end = simulate(schedule, costs).makespan
    for generator in SCHEDULES.values():
        try:
            other = generator(ranks, stages, microbatches)
        except ScheduleError:
            continue
        trains = any(action.leaves[-1].kind is not Kind.F for _, _, action in other.cells())
        if trains and (cap is None or max(peaks(other, costs)) <= cap):
            assert end <= simulate(other, costs).makespan + 1e-9


def test_a_whole_backward_is_taken_where_it_is_faster_and_a_split_one_where_it_helps() -> None:
    slow, fast = StageCosts(1, 1, 1), StageCosts(1, 1, 1, backward=1.2)

    def kinds(stage: StageCosts) -> set[Kind]:
        schedule = schedule_auto(Costs((stage,) * 4), ranks=4, microbatches=4)
        return {action.kind for _, _, action in schedule.cells()}

    assert Kind.B in kinds(fast)
    assert {Kind.I, Kind.W} <= kinds(slow)
    assert kinds(replace(slow, backward=2.0)) == kinds(slow)


def test_the_same_arguments_give_the_same_table() -> None:
    costs = random_costs(Random(3), 4)
    tables = [
        schedule_auto(costs, 4000, ranks=2, microbatches=5, seed=seed, name="mine", effort=0.2) for seed in (0, 0)
    ]
    assert tables[0] == tables[1]
    assert tables[0].name == "mine"


def test_any_placement() -> None:
    home = {0: 0, 1: 2, 2: 1, 3: 1, 4: 0}
    schedule = schedule_auto(Costs.unit(5, 1), ranks=4, microbatches=3, placement=home)
    assert dict(schedule.rank_of_stage) == home
    assert schedule.table[3] == ()
    check(add_send_recv(schedule), ranks=4, stages=5, microbatches=3)


@pytest.mark.exhaustive
def test_loop_and_v_are_both_tried() -> None:
    """Under little memory the V has the advantage; a placement that the caller names is kept."""
    costs = Costs.unit(8, 4)
    ends = {
        placement: simulate(
            schedule_auto(costs, 2000, ranks=4, microbatches=8, placement=placement, effort=0.2), costs
        ).makespan
        for placement in ("loop", "v", None)
    }
    assert ends[None] == ends["v"] < ends["loop"]
    assert schedule_auto(costs, ranks=4, microbatches=2, placement="loop").rank_of_stage[4] == 0


@pytest.mark.parametrize(("seed", "stages", "ranks"), [(0, 4, 2), *further((1, 5, 2), (2, 4, 3))])
def test_a_free_placement_is_nearly_the_best_of_all(seed: int, stages: int, ranks: int) -> None:
    """A heavy head; all mappings are searched one by one."""
    costs = random_costs(Random(seed), stages)
    costs = replace(costs, stages=(*costs.stages[:-1], StageCosts(4, 4, 4, saved_bytes=1000)))

    def end(placement: str | dict[int, int] | None) -> float:
        return simulate(schedule_auto(costs, ranks=ranks, microbatches=6, placement=placement, effort=0.1), costs).makespan

    homes = (dict(enumerate(each)) for each in product(range(ranks), repeat=stages))
    best = min(map(end, homes))
    assert end("free") <= 1.02 * best
    assert stages % ranks or end(None) > 1.1 * best


@pytest.mark.parametrize("seed", [3, *further(0, 1, 2, 4, 5)])
def test_a_free_placement_keeps_caps_and_is_never_worse(seed: int) -> None:
    random = Random(seed)
    ranks, stages, microbatches = random.randint(1, 4), random.randint(1, 8), random.randint(1, 5)
    costs = replace(random_costs(random, stages), blocking=random.random() < 0.3, overlap=random.choice((1.0, 0.8)))
    caps = [random.randint(800, 1600) * -(-stages // ranks) * random.randint(1, 3) for _ in range(ranks)]
    options = {"ranks": ranks, "microbatches": microbatches, "effort": 0.05}
    free = schedule_auto(costs, caps, placement="free", **options)  # type: ignore[arg-type]
    assert free == schedule_auto(costs, caps, placement="free", **options)  # type: ignore[arg-type]
    sent = free if free.has_communication else add_send_recv(free)
    check(sent, ranks=ranks, stages=stages, microbatches=microbatches)
    assert all(peak <= cap for peak, cap in zip(peaks(free, costs), caps, strict=True))
    if stages % ranks == 0:
        with suppress(ScheduleError):  # no even placement fits
            even = schedule_auto(costs, caps, **options)  # type: ignore[arg-type]
            assert simulate(free, costs).makespan <= simulate(even, costs).makespan * (1 + 1e-9)


def test_no_table_is_faster_than_the_bound_of_its_placement() -> None:
    """The search stops at the first bound that is no better, also where collectives hide."""
    random, tight = Random(0), 0
    for _ in range(examples(20)):
        stages, microbatches = random.choice([2, 4, 5]), random.choice([4, 8])
        own = ((random.uniform(0, 2), random.uniform(0, 2)) for _ in range(stages))
        costs = Costs(tuple(StageCosts(2, 2, 2, exchanged={Kind.F: on, Kind.I: back}) for on, back in own), hidden=1.0)
        home = (0, *(random.randrange(2) for _ in range(stages - 2)), 1)
        search = PlacementSearch(costs, 2, microbatches, lambda placed, costs=costs: costs, lambda placed: [inf, inf])
        bound = search.bound(Placed(tuple(range(stages)), home))[1]
        options = {"ranks": 2, "microbatches": microbatches, "placement": dict(enumerate(home)), "effort": 0.05}
        found = simulate(schedule_auto(costs, **options), costs).makespan  # type: ignore[arg-type]
        assert bound <= found * (1 + 1e-9)
        tight += found < 1.3 * bound
    assert tight


def test_a_free_placement_fits_where_no_even_one_does() -> None:
    costs = Costs((StageCosts(saved_bytes=10),) * 4)
    with pytest.raises(ScheduleError, match="memory_cap admits no schedule"):
        schedule_auto(costs, [30, 10], ranks=2, microbatches=2)
    schedule = schedule_auto(costs, [30, 10], ranks=2, microbatches=2, placement="free", effort=0.1)
    assert sorted(schedule.rank_of_stage.values()) == [0, 0, 0, 1]
    with pytest.raises(ScheduleError, match="memory_cap admits no schedule"):
        schedule_auto(costs, [20, 10], ranks=2, microbatches=2, placement="free")


@pytest.mark.parametrize(
    "stage",
    [
        StageCosts(0, 0, 0, saved_bytes=10),
        StageCosts(0, 1, 1, backward=0, saved_bytes=10),
        StageCosts(1, 0, 0, saved_bytes=10, kept_bytes=30),
        StageCosts(1e-9, 2e-9, 1e-9, saved_bytes=10),
        StageCosts(1, 1, 1, saved_bytes=0),
    ],
)
def test_odd_costs_under_the_smallest_cap(stage: StageCosts) -> None:
    costs = Costs((stage,) * 6)
    schedule = schedule_auto(costs, 2 * stage.saved_bytes, ranks=3, microbatches=4, effort=0.1)
    check(schedule, ranks=3, stages=6, microbatches=4)
    assert peaks(schedule, costs) == [2 * stage.saved_bytes] * 3


def test_the_smallest_cap_is_named_and_enough() -> None:
    costs = random_costs(Random(2), 4)
    least = [costs.stages[0].saved_bytes + costs.stages[3].saved_bytes, sum(s.saved_bytes for s in costs.stages[1:3])]
    with pytest.raises(ScheduleError, match=rf"needs .*{max(least)}.* raise it to at least {max(least)}\b"):
        schedule_auto(costs, max(least) - 1, ranks=2, microbatches=3, placement="v")
    assert peaks(schedule_auto(costs, least, ranks=2, microbatches=3, placement="v"), costs) == least


@pytest.mark.parametrize(
    ("kind", "cap", "best"),
    [(Kind.F, 100, 18), (Kind.I, 20, 12), (Kind.W, 20, 12), (Kind.B, 20, 10)],
)
def test_a_program_that_takes_much_while_it_runs_refuses_no_cap_that_another_order_keeps(
    kind: Kind, cap: int, best: float
) -> None:
    large, small = StageCosts(saved_bytes=10, peak_bytes={kind: 100}), StageCosts(saved_bytes=10)
    costs, ranks = (Costs((large, small)), 1) if kind is Kind.F else (Costs((large, large)), 2)
    schedule = schedule_auto(costs, cap, ranks=ranks, microbatches=3)
    assert max(peaks(schedule, costs)) <= cap
    assert simulate(schedule, costs).makespan <= best


@pytest.mark.first_cases(4)
@pytest.mark.parametrize("seed", range(20))
def test_with_working_bytes_the_cap_that_is_named_is_enough(seed: int) -> None:
    random = Random(seed)
    ranks = random.choice((1, 2, 3))
    base = random_costs(random, ranks * random.choice((1, 2)))
    kinds = (Kind.F, Kind.B, Kind.I, Kind.W)
    working = [{kind: random.randint(0, 4000) for kind in random.sample(kinds, 3)} for _ in base.stages]
    costs = replace(base, stages=tuple(replace(s, peak_bytes=w) for s, w in zip(base.stages, working, strict=True)))
    with pytest.raises(ScheduleError, match="raise it to at least") as refused:
        schedule_auto(costs, 1, ranks=ranks, microbatches=3)
    least = int(str(refused.value).split("at least ")[1].split(",")[0])
    assert max(peaks(schedule_auto(costs, least, ranks=ranks, microbatches=3, effort=0.1), costs)) <= least
    with pytest.raises(ScheduleError, match=f"at least {least},"):
        schedule_auto(costs, least - 1, ranks=ranks, microbatches=3)


def test_a_cap_is_a_number() -> None:
    costs = Costs.unit(4, 2)
    for cap, said in ((float("nan"), "nan"), ("1 GB", "'1 GB'"), ([4000, None], "None")):
        with pytest.raises(ScheduleError, match=rf"memory_cap=.*{said}.* no number of bytes"):
            schedule_auto(costs, cap, ranks=2, microbatches=2)  # type: ignore[arg-type]
    assert schedule_auto(costs, 2000.5, ranks=2, microbatches=2).ranks == 2  # type: ignore[arg-type]


def test_costs_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ScheduleError, match="0 or more"):
        StageCosts(forward=-1)
    with pytest.raises(ScheduleError, match="0 or more"):
        StageCosts(weight_grad=float("nan"))
    with pytest.raises(ScheduleError, match="finite"):
        StageCosts(backward=float("inf"))
    with pytest.raises(ScheduleError, match="sends_forward has the times of 1 messages, and there are 3"):
        Costs((StageCosts(),) * 4, (1.0,), (1.0,))
    with pytest.raises(ScheduleError, match="0 or more"):
        Costs((StageCosts(),) * 2, (-0.5,))


def test_wrong_requests() -> None:
    costs = Costs.unit(4)
    with pytest.raises(ScheduleError, match="4 stages cannot be dealt evenly to 3 ranks"):
        schedule_auto(costs, ranks=3, microbatches=2)
    with pytest.raises(ScheduleError, match="unknown placement 'w'"):
        schedule_auto(costs, ranks=2, microbatches=2, placement="w")
    with pytest.raises(ScheduleError, match="gives 3 ranks"):
        schedule_auto(costs, [1, 2, 3], ranks=2, microbatches=2)
    with pytest.raises(ScheduleError, match="stage 3 on rank 2"):
        schedule_auto(costs, ranks=2, microbatches=2, placement={0: 0, 1: 1, 2: 0, 3: 2})
    with pytest.raises(ScheduleError, match=r"names stages \[0, 1\]"):
        schedule_auto(costs, ranks=2, microbatches=2, placement={0: 0, 1: 1})
    with pytest.raises(ScheduleError, match="microbatches: take a positive integer"):
        graphpp.schedule_auto(costs, ranks=2, microbatches=0)


def problems(seed: int, ranks: int, chunks: int, microbatches: int) -> tuple[Costs, Problem]:
    random = Random(seed)
    costs = random_costs(random, ranks * chunks)
    home = {stage: random.randrange(ranks) for stage in range(ranks * chunks)}
    need = [sum(costs.stages[stage].saved_bytes for stage in home if home[stage] == rank) for rank in range(ranks)]
    return costs, Problem.of(costs, home, microbatches, [random.choice((1.0, 1.7, 3.0)) * each for each in need])


def solved(problem: Problem) -> list[EvaluatedOrder]:
    whole = bytearray(
        problem.kept[x // problem.microbatches] > problem.saved[x // problem.microbatches] for x in range(problem.count)
    )
    candidates = list(start_patterns(problem, whole, Random(0)))[:40]
    solutions = [solution for candidate in candidates if (solution := evaluate_order(problem, candidate))]
    assert solutions  # one microbatch after the other always fits
    return solutions


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 6))
def test_a_solution_is_what_the_simulator_says(seed: int, ranks: int, chunks: int, microbatches: int) -> None:
    costs, problem = problems(seed, ranks, chunks, microbatches)
    costs = replace(costs, overhead=0.25)
    problem = Problem.of(costs, dict(enumerate(problem.home)), microbatches, problem.cap)
    for solution in solved(problem)[::8]:
        for candidate in (solution.candidate, fill_waits(problem, solution.candidate, 5)):
            again = evaluate_order(problem, candidate)
            assert again is not None
            table = schedule_of(problem, numbered(again, join=False), "found")
            timeline = simulate(table, costs)
            assert timeline.makespan == pytest.approx(again.makespan * problem.unit)
            assert all(timeline.peak_bytes(rank) <= cap for rank, cap in enumerate(problem.cap))
            assert again.makespan >= problem.bound() * (1 - 1e-9)
            joined = simulate(schedule_of(problem, numbered(again, join=True), "found"), costs)
            assert joined.makespan <= timeline.makespan * (1 + 1e-9)
