"""Simulated timelines: small ones computed by hand, and properties of any legal table against a second implementation."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphpp
from graphpp.errors import ScheduleError
from graphpp.schedules.check.step_memory import step_totals
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.simulate import bytes_over_time
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.actions import Action, Kind, upstream
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import named, random_rows

TWO = Schedule.of(["0F0 0F1 . . 0B0 . 0B1", ". 1F0 1B0 1F1 1B1"], name="1F1B")


def spans(timeline: Timeline, rank: int) -> str:
    return " ".join(f"{event.action}:{event.start:g}-{event.end:g}" for event in timeline.on(rank))


def test_two_ranks_without_messages() -> None:
    timeline = graphpp.simulate(TWO, Costs.unit(2))
    assert spans(timeline, 0) == "0F0:0-1 0F1:1-2 0B0:4-6 0B1:7-9"
    assert spans(timeline, 1) == "1F0:1-2 1B0:2-4 1F1:4-5 1B1:5-7"
    assert timeline.makespan == 9
    assert timeline.bubble(0) == timeline.bubble(1) == pytest.approx(1 / 3)
    assert timeline.memory[0] == ((0, 0), (0, 1000), (1, 2000), (6, 1000), (9, 0))
    assert [timeline.peak_bytes(rank) for rank in (0, 1)] == [2000, 1000]


def test_a_message_travels_beside_the_computations() -> None:
    timeline = simulate(TWO, Costs.unit(2, send=0.5))
    assert spans(timeline, 0) == "0F0:0-1 0F1:1-2 0B0:5-7 0B1:8-10"
    assert spans(timeline, 1) == "1F0:1.5-2.5 1B0:2.5-4.5 1F1:4.5-5.5 1B1:5.5-7.5"


def test_sends_and_receives_are_events_that_take_nothing_from_their_rank() -> None:
    timeline = simulate(add_send_recv(TWO), Costs.unit(2, send=0.5))
    assert timeline.makespan == 10
    assert spans(timeline, 1).startswith("1RECV_F0:0-0 1F0:1.5-2.5 1RECV_F1:2.5-2.5 1B0:2.5-4.5 1SEND_B0:4.5-4.5")


def test_a_blocking_message_holds_both_ranks() -> None:
    timeline = simulate(TWO, replace(Costs.unit(2, send=0.5), blocking=True))
    assert spans(timeline, 0) == (
        "0F0:0-1 0SEND_F0:1-1.5 0F1:1.5-2.5 0SEND_F1:2.5-3 0RECV_B0:3-5.5 0B0:5.5-7.5 0RECV_B1:7.5-9 0B1:9-11"
    )
    assert spans(timeline, 1) == (
        "1RECV_F0:0-1.5 1F0:1.5-2.5 1RECV_F1:2.5-3 1B0:3-5 1SEND_B0:5-5.5 1F1:5.5-6.5 1B1:6.5-8.5 1SEND_B1:8.5-9"
    )


def test_overhead_comes_before_each_action_and_is_spent_waiting_where_one_waits() -> None:
    schedule = Schedule.of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"])
    timeline = simulate(schedule, replace(Costs.unit(2), overhead=0.25))
    assert spans(timeline, 0) == "0F0:0.25-1.25 0F1:1.5-2.5 0B0:4.5-6.5 0B1:8-10"
    assert spans(timeline, 1) == "1F0:1.25-2.25 1B0:2.5-4.5 1F1:4.75-5.75 1B1:6-8"


def test_a_split_backward_keeps_some_bytes_until_its_weight_gradients_are_there() -> None:
    costs = Costs((StageCosts(1, 2, 3, saved_bytes=10, kept_bytes=4),))
    timeline = simulate(Schedule.of(["0F0 0F1 0I0 0W0 0B1"]), costs)
    assert spans(timeline, 0) == "0F0:0-1 0F1:1-2 0I0:2-4 0W0:4-7 0B1:7-12"
    assert timeline.memory[0] == ((0, 0), (0, 10), (1, 20), (4, 14), (7, 10), (12, 0))


def test_an_overlap_is_one_event_that_waits_for_all_its_inputs() -> None:
    schedule = Schedule.of(["0F0 0F1 0B0 0B1", "1F0 (1F1;1B0)OVERLAP_F_B 1B1"])
    timeline = simulate(schedule, replace(Costs.unit(2), overlap=0.5))
    assert spans(timeline, 1) == "1F0:1-2 (1F1;1B0)OVERLAP_F_B:2-3.5 1B1:3.5-5.5"
    assert spans(timeline, 0) == "0F0:0-1 0F1:1-2 0B0:3.5-5.5 0B1:5.5-7.5"
    assert timeline.memory[1] == ((0, 0), (1, 1000), (2, 2000), (3.5, 1000), (5.5, 0))


def test_ranks_that_wait_for_each_other_are_named() -> None:
    with pytest.raises(ScheduleError, match=r"(?s)rank 0 stops at 0B0, .*1B0 or 1I0.*rank 1 stops at 1F1, .*0F1"):
        simulate(Schedule.of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"]), Costs.unit(2))


def test_a_result_without_its_receive_never_arrives() -> None:
    schedule = Schedule.of(["0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"])
    with pytest.raises(ScheduleError, match="rank 1 stops at 1F0, which waits for 0F0"):
        simulate(schedule, Costs.unit(2))


@pytest.mark.parametrize("blocking", [False, True])
def test_a_send_before_its_computation_is_refused(blocking: bool) -> None:
    schedule = Schedule.of(["0SEND_F0 0F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"])
    with pytest.raises(ScheduleError, match="rank 0 stops at 0SEND_F0"):
        simulate(schedule, replace(Costs.unit(2), blocking=blocking))


def test_costs_of_another_pipeline_are_refused() -> None:
    with pytest.raises(ScheduleError, match="costs are for 3 stages"):
        simulate(TWO, Costs.unit(3))
    with pytest.raises(ScheduleError, match="no stage 1 of 1"):
        simulate(replace(TWO, stages=1), Costs.unit(1))
    with pytest.raises(ScheduleError, match="no microbatch 1 of 1"):
        simulate(replace(TWO, microbatches=1), Costs.unit(2))


def test_events_and_curves_are_sequences_that_are_made_when_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of 256 ranks, 512 stages and 2,048 microbatches has two million events."""
    table = Schedule(((), *TWO.table), 2, 2)  # the first rank has no events
    timeline, read = simulate(table, Costs.unit(2)), list[int]()

    def totals(table: Schedule, rank: int, costs: Costs) -> list[int]:
        read.append(rank)
        return step_totals(table, rank, costs)

    monkeypatch.setattr(bytes_over_time, "step_totals", totals)
    assert timeline.peak_bytes(1) == 2000 and timeline.memory and timeline.peak_bytes(1) == 2000
    assert read == [1]
    events = tuple(timeline.events)
    assert len(timeline.events) == len(events) == 8 and timeline.on(1) + timeline.on(2) == events
    assert [timeline.events[at] for at in range(-8, 8)] == [*events, *events] and timeline.events[2:5] == events[2:5]
    assert timeline == pickle.loads(pickle.dumps(timeline)) and hash(timeline) == hash(replace(timeline, events=events))
    assert timeline == replace(timeline, events=events, memory=tuple(timeline.memory)) and timeline.makespan == 9


@st.composite
def costs_for(draw: st.DrawFn, stages: int) -> Costs:
    times, counts = st.integers(0, 8).map(float), st.integers(0, 20)
    each = st.builds(StageCosts, times, times, times, st.none() | times, counts, st.none() | counts)
    sends = st.lists(times, min_size=stages - 1, max_size=stages - 1).map(tuple)
    overhead = draw(st.sampled_from((0.0, 0.5)))
    return Costs(
        tuple(draw(st.lists(each, min_size=stages, max_size=stages))), draw(sends), draw(sends), overhead=overhead
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Costs]:
    if draw(st.booleans()):
        schedule = draw(named())
    else:
        random, ranks = draw(st.randoms(use_true_random=False)), draw(st.integers(1, 4))
        stages, microbatches = ranks + draw(st.integers(0, 3)), draw(st.integers(1, 4))
        schedule = Schedule.of(random_rows(random, ranks, stages, microbatches), stages=stages)
    return schedule, draw(costs_for(schedule.stages))


def reference(schedule: Schedule, costs: Costs) -> dict[Action, float]:
    """The end of each action of a compute-only table, by delaying actions until none starts before its inputs."""
    ends, changed = {leaf: 0.0 for _, _, action in schedule.cells() for leaf in action.leaves}, True
    while changed:
        changed = False
        for row in schedule.table:
            free = 0.0
            for action in filter(None, row):
                inputs = [arrival(schedule, costs, leaf, ends) for leaf in action.leaves]
                free = max(free + costs.overhead, *inputs) + costs.of(action)
                changed = changed or any(ends[leaf] != free for leaf in action.leaves)
                ends.update(dict.fromkeys(action.leaves, free))
    return ends


def arrival(schedule: Schedule, costs: Costs, leaf: Action, ends: dict[Action, float]) -> float:
    latest = 0.0
    for maker in upstream(leaf, schedule.stages):
        sends = costs.sends_forward if maker.kind is Kind.F else costs.sends_backward
        apart = schedule.rank_of_stage[maker.stage] != schedule.rank_of_stage[leaf.stage]
        latest = max(latest, ends.get(maker, 0.0) + (sends[min(maker.stage, leaf.stage)] if apart else 0.0))
    return latest


@settings(max_examples=examples(80), deadline=None)
@given(cases())
def test_every_end_is_that_of_another_way_to_count(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    ends = {leaf: event.end for event in simulate(schedule, costs).events for leaf in event.action.leaves}
    assert ends == reference(schedule, costs)


@settings(max_examples=examples(60), deadline=None)
@given(cases(), st.booleans())
def test_events_are_in_order_and_memory_ends_at_nothing(case: tuple[Schedule, Costs], blocking: bool) -> None:
    schedule, costs = case
    timeline = simulate(schedule, replace(costs, blocking=blocking))
    for rank, row in enumerate(timeline.schedule.table):
        events = timeline.on(rank)
        assert [event.action for event in events] == [action for action in row if action]
        assert all(first.end + costs.overhead <= then.start for first, then in pairwise(events))
        assert timeline.busy(rank) <= timeline.makespan
        memory = timeline.memory[rank]
        assert memory[-1][1] == 0
        assert min(count for _, count in memory) == 0
        assert all(earlier[0] <= later[0] for earlier, later in pairwise(memory))
    if blocking:
        assert timeline.makespan >= simulate(schedule, costs).makespan


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_sends_and_receives_that_hold_nothing_up_change_nothing(case: tuple[Schedule, Costs]) -> None:
    schedule, costs = case
    costs = replace(costs, overhead=0.0)
    alone, together = simulate(schedule, costs), simulate(add_send_recv(schedule), costs)
    computed = [event for event in together.events if event.action.is_compute]
    assert computed == list(alone.events)
    assert together.memory == alone.memory
