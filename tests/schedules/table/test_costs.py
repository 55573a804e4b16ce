"""The time of an OVERLAP_F_B: collectives of a stage hide under the computation of another part, wherever it is priced."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpp import Costs, StageCosts
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.search.tables import Tables, rows_of
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.step_time import StepTimes
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples

PAIR = ((0, Kind.F, False), (1, Kind.B, False))


@pytest.mark.parametrize(
    ("forward", "backward", "least"),
    [
        ((4, 0), (8, 0), 12),  # nothing to hide
        ((6, 3), (8, 3), 8),  # all computation: both exchanges hide
        ((4, 0), (8, 3), 9),  # all computation, although one part exchanges nothing
        ((6, 3), (8, 0), 11),
        ((10, 9), (10, 7), 16),  # all exchanges, which take longer than the computation
        ((20, 8), (6, 0), 20),  # the forward alone: its exchange has room for more than the backward
        ((1, 0), (9, 6), 7),  # the input gradients alone: the weight gradients run beside their exchange
    ],
)
def test_a_pair_takes_its_computation_or_its_collectives_or_a_chain_alone(
    forward: tuple[int, int], backward: tuple[int, int], least: int
) -> None:
    first = StageCosts(forward[0], exchanged={Kind.F: forward[1]})
    second = StageCosts(input_grad=7, backward=backward[0], exchanged={Kind.B: backward[1]})
    costs, whole = Costs((first, second), hidden=1.0), forward[0] + backward[0]
    assert costs.together(PAIR) == costs.together(PAIR[::-1]) == least
    assert replace(costs, hidden=0.0).together(PAIR) == whole
    assert replace(costs, hidden=0.5).together(PAIR) == (whole + least) / 2
    assert replace(costs, overlap=0.5).together(PAIR) == least / 2


def test_a_backward_of_two_halves_has_the_collectives_of_both() -> None:
    halves = StageCosts(1, 4, 2, exchanged={Kind.I: 3, Kind.W: 1})
    assert halves.lines(Kind.B).exchanged == 4
    assert replace(halves, backward=5.0).lines(Kind.B).exchanged == 0, "its time is its own, and so are its collectives"


def test_a_backward_that_hides_collectives_itself_has_fewer_left_for_a_pair() -> None:
    forward, whole = StageCosts(3, exchanged={Kind.F: 1}), StageCosts(input_grad=4, backward=8, exchanged={Kind.B: 3})
    alone = replace(whole, backward=6.0, overlapped={Kind.B: 2})
    costs, in_sequence = Costs((forward, alone), hidden=1.0), Costs((forward, whole), hidden=1.0)
    assert costs.together(PAIR) == in_sequence.together(PAIR) == 7, "all computation"
    assert replace(costs, hidden=0.0).together(PAIR) == 9, "as long as each alone"
    assert replace(costs, hidden=0.5).together(PAIR) == 9, "the pair would take 11 - 0.5 * 4"
    assert costs.in_sequence.stages == (forward, whole)
    assert alone.behind(1.0, {}).lines(Kind.B) == (5, 3, 2)


def test_in_sequence_the_hidden_seconds_are_back() -> None:
    halves = StageCosts(3, 4, 4, exchanged={Kind.B: 3}, overlapped={Kind.B: 2}, ahead=StageCosts(2, backward=5))
    hiding = replace(halves, ahead=StageCosts(2, backward=4, exchanged={Kind.B: 2}, overlapped={Kind.B: 1}))
    assert hiding.in_sequence.of(Kind.B) == halves.lines(Kind.B).in_sequence == 10
    assert (hiding.in_sequence.of(Kind.B, True), halves.in_sequence.of(Kind.B, True), hiding.of(Kind.B, True)) == (5, 5, 4)
    assert hiding.in_sequence.lines(Kind.B).both == 0


def test_overlapped_seconds_are_seconds_of_collectives() -> None:
    with pytest.raises(ScheduleError, match="overlapped of StageCosts: take a part"):
        StageCosts(backward=3, exchanged={Kind.B: 1}, overlapped={Kind.B: 2})
    with pytest.raises(ScheduleError, match="overlapped of StageCosts: take a part"):
        StageCosts(overlapped={Kind.R: 0})


def test_collectives_are_a_part_of_the_time() -> None:
    with pytest.raises(ScheduleError, match="take a part of the time of F, B, I or W, got 2 of F, which takes 1"):
        StageCosts(1, exchanged={Kind.F: 2})
    with pytest.raises(ScheduleError, match="got 0 of SEND_F"):
        StageCosts(1, exchanged={Kind.SEND_F: 0})
    with pytest.raises(ScheduleError, match="hidden: take a share from 0 to 1"):
        Costs((StageCosts(),), hidden=1.5)


def mixed(random: Random, stages: int) -> Costs:
    """Costs of stages of which some exchange much, some little, some nothing, and hide some of it themselves."""
    each = []
    for _ in range(stages):
        times = {kind: random.uniform(0.5, 2) for kind in (Kind.F, Kind.I, Kind.W, Kind.B)}
        exchanged = {kind: random.choice((0, 0.3, 0.9)) * seconds for kind, seconds in times.items()}
        overlapped = {kind: random.choice((0, 0.5, 1)) * min(one, times[kind] - one) for kind, one in exchanged.items()}
        took = {kind: seconds - overlapped[kind] for kind, seconds in times.items()}
        whole = took[Kind.F], took[Kind.I], took[Kind.W], took[Kind.B]
        each.append(StageCosts(*whole, exchanged=exchanged, overlapped=overlapped))
    sends = [tuple(random.choice((0.0, 0.2)) for _ in range(stages - 1)) for _ in range(2)]
    return Costs(tuple(each), *sends, overlap=random.choice((1.0, 0.9)), hidden=random.choice((0.5, 1.0)))


def seconds(table: Schedule, costs: Costs) -> float:
    """The makespan, which all ways to compute one agree upon, and no lower bound exceeds."""
    found = simulate(table, costs).makespan
    assert StepTimes(table).seconds(costs).makespan == pytest.approx(found)
    problem = Problem.of(costs, table.rank_of_stage, table.microbatches, [1e9] * table.ranks)
    tables = Tables(costs, [table.rank_of_stage], table.microbatches, [1e9] * table.ranks)
    assert tables.end(tables.complete(rows_of(problem, table))) == pytest.approx(found)
    assert problem.bound() * problem.unit <= found * (1 + 1e-9)
    assert sum(map(costs.of, filter(None, table.table[0]))) == pytest.approx(simulate(table, costs).busy(0))
    return found


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(2, 3), st.integers(0, 10**6))
def test_pairs_have_one_price_and_bounds_stay_below(ranks: int, seed: int) -> None:
    costs, table = mixed(Random(seed), 2 * ranks), SCHEDULES["DualPipeV"](ranks, 2 * ranks, 2 * ranks + 1)
    assert seconds(table, costs) <= seconds(table, replace(costs, hidden=0.0)) * (1 + 1e-9)
    seconds(SCHEDULES["Combined1F1B"](1, 2, 5), mixed(Random(seed), 2))


@pytest.mark.parametrize("seed", range(2))
def test_a_search_pairs_what_hides(seed: int) -> None:
    """It is no slower than DualPipeV, and faster than without pairs, where only collectives gain."""
    costs = replace(mixed(Random(seed), 4), overlap=1.0)
    table = schedule_auto(costs, ranks=2, microbatches=6, placement="v", effort=0.3)
    named = SCHEDULES["DualPipeV"](2, 4, 6)
    assert seconds(table, costs) <= seconds(named, costs) * (1 + 1e-9)
    apart = schedule_auto(replace(costs, hidden=0.0), ranks=2, microbatches=6, placement="v", effort=0.3)
    assert simulate(table, costs).makespan < simulate(apart, costs).makespan
    assert any(action.parts for _, _, action in table.cells()) and not any(action.parts for _, _, action in apart.cells())
