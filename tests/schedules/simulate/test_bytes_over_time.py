"""Bytes by kind over time: the peaks of the plan, at the times of the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.check.step_memory import step_peaks
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.simulate.bytes_over_time import MemoryCurves, bytes_over_time
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Event
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import StateBytes, held_bytes

STAGES = 4
COSTS = Costs(tuple(StageCosts(1, 1, 1, saved_bytes=10 + stage) for stage in range(STAGES)))
STATE = [StateBytes((stage,), (stage,), 100, 100, rounded=7, optimizer=200, buffers=3) for stage in range(STAGES)]


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("keep", [None, 1, 2])
def test_the_highest_sum_is_the_peak_of_the_plan(name: str, keep: int | None) -> None:
    ranks = STAGES if name in ("1F1B", "GPipe") else STAGES // 2
    table = place_shards(add_send_recv(make_table(name, ranks, STAGES, 4)), keep)
    held = held_bytes(STATE, table.rank_of_stage, ranks, 2, keep is not None)
    curves = bytes_over_time(simulate(table, COSTS), COSTS, held)
    peaks = step_peaks(table, COSTS, held)
    for curve, peak in zip(curves, peaks, strict=True):
        assert max(sum(parts.values()) for _, parts in curve) == peak.nbytes
        assert peak.parts in [parts for _, parts in curve]
        times = [time for time, _ in curve]
        assert times == sorted(times)


def test_bytes_change_when_the_actions_of_the_row_begin_and_end() -> None:
    """Gathers of one stage are several equal actions of a row."""
    table = place_shards(add_send_recv(make_table("Interleaved1F1B", 2, STAGES, 4)), 1)
    timeline = simulate(table, replace(COSTS, gathers=(0.1,) * STAGES, reductions=(0.1,) * STAGES))
    for rank, (row, curve) in enumerate(zip(table.table, timeline.memory, strict=True)):
        assert len(row) > len(set(row))
        forwards = [event.start for event in timeline.events if event.rank == rank and event.action.kind is Kind.F]
        assert [time for time, _ in curve][1:3] == sorted(forwards)[:2]


def test_receives_that_are_posted_early_delay_no_bytes() -> None:
    """In a measured timeline the event of a receive is the wait for its message, right before the computation that reads it."""
    row = "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1"
    table = Schedule.of(["0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1", row])
    spans = {"1RECV_F0": (0, 1), "1F0": (1, 2), "1B0": (2, 3), "1RECV_F1": (3, 4), "1F1": (4, 5), "1B1": (5, 6)}
    actions = {str(action): action for action in table.table[1]}
    events = [Event(1, actions[name], *span) for name, span in spans.items()]
    costs = Costs((StageCosts(saved_bytes=10, received_bytes={Kind.F: 3}),) * 2)
    assert MemoryCurves(table, events, costs)[1] == ((0, 0), (0, 3), (1, 6), (1, 13), (3, 3), (4, 10), (6, 0))


def test_a_reduction_that_a_computation_overlaps_delays_no_bytes() -> None:
    table = place_shards(add_send_recv(make_table("Interleaved1F1B", 2, STAGES, 4)), 2)
    timeline = simulate(table, replace(COSTS, gathers=(0.1,) * STAGES, reductions=(5.0,) * STAGES))
    for rank, curve in enumerate(timeline.memory):
        moments = {time for each in timeline.on(rank) if each.action.is_compute for time in (each.start, each.end)}
        assert {time for time, _ in curve} <= {0.0, *moments}


def test_costs_of_other_stages_are_refused() -> None:
    timeline = simulate(make_table("1F1B", 2, 2, 3), Costs(COSTS.stages[:2]))
    with pytest.raises(ScheduleError, match="stages"):
        bytes_over_time(timeline, COSTS)
    with pytest.raises(ScheduleError, match="held has the bytes of 1 ranks"):
        bytes_over_time(replace(timeline), Costs(COSTS.stages[:2]), held_bytes(STATE[:1], {0: 0}, 1))
