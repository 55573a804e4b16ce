"""The bytes of a step: counted by hand on small rows, against the counts of shards on random tables, and against a cap."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from graphpp.errors import ScheduleError
from graphpp.schedules.check.schedule_under_check import ScheduleUnderCheck
from graphpp.schedules.check.step_memory import StepMemory, check_memory, step_peaks
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, MessageFlow, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import HeldBytes, LayerBytes, StateBytes, held_bytes
from tests.exhaustive import examples
from tests.schedules.tables import Rows, tables


def saving(*nbytes: int) -> Costs:
    return Costs(tuple(StageCosts(saved_bytes=each) for each in nbytes))


STAGES = [StateBytes((0,), (0,), weights=100, sums=30, optimizer=8), StateBytes((1,), (1,), weights=50, sums=10, buffers=1)]
ROW = "0UNSHARD 0F0 0RESHARD 1UNSHARD 1F0 1B0 1RESHARD 0UNSHARD 0B0 0RESHARD"


@pytest.mark.parametrize(
    ("activations", "column", "parts"),
    [  # weights whole, gradients whole, messages of reductions, activations; the state that stands is 75 + 20 + 4 + 1
        ((3, 4), 9, (100, 0, 60, 0)),  # the gradients of stage 0 have left, and as many bytes arrive
        ((300, 4), 7, (100, 0, 20, 300)),  # the messages of 1RESHARD are still there, and no gradients of stage 0 yet
        ((3, 400), 4, (50, 0, 0, 403)),
    ],
)
def test_the_peak_of_the_sum_is_no_sum_of_peaks(activations: tuple[int, int], column: int, parts: tuple[int, ...]) -> None:
    (found,) = step_peaks(Schedule.of([ROW]), saving(*activations), held_bytes(STAGES, {0: 0, 1: 0}, 1, 2, frees=True))
    assert found.column == column
    standing = {"shards": 75 + 20, "optimizer": 4, "buffers": 1}
    assert found.parts == standing | dict(zip(("weights", "gradients", "messages", "activations"), parts, strict=True))
    assert found.most == standing | {"weights": 100, "gradients": 30, "messages": 60, "activations": sum(activations)}
    assert found.nbytes < sum(found.most.values())


@pytest.mark.parametrize(
    ("row", "saved", "column", "gradients", "activations"),
    [
        ("0UNSHARD 0F0 0B0 0RESHARD", 10, 2, 30, 4),  # near the end of the backward the saved values have been read
        ("0UNSHARD 0F0 0B0 0RESHARD", 40, 2, 0, 44),  # at its start there are no gradients
        ("0UNSHARD 0F0 0F1 0B0 0B1 0RESHARD", 10, 3, 30, 14),  # the other microbatch's values are there too
        ("0UNSHARD 0F0 0F1 0I0 0W0 0I1 0W1 0RESHARD", 10, 5, 30, 15),
    ],
)
def test_sums_come_while_saved_values_go(row: str, saved: int, column: int, gradients: int, activations: int) -> None:
    """A backward takes 4 bytes beside the saved values, an input gradient 5."""
    peaks = {Kind.B: saved + 4, Kind.I: saved + 5, Kind.W: saved}
    costs = Costs((StageCosts(saved_bytes=saved, kept_bytes=saved, peak_bytes=peaks),))
    state = [StateBytes((0,), (0,), sums=30, sent=0)]
    (found,) = step_peaks(Schedule.of([row]), costs, held_bytes(state, {0: 0}, 1, 1, frees=True))
    assert (found.column, found.parts["gradients"], found.parts["activations"]) == (column, gradients, activations)


def test_single_layers_come_and_go_within_a_computation() -> None:
    layers = {
        (0, Kind.F): LayerBytes(whole=20), (1, Kind.F): LayerBytes(whole=10),
        (0, Kind.B): LayerBytes(40, 15, 12), (1, Kind.B): LayerBytes(8, 5, 3),
    }  # fmt: skip
    held = held_bytes(STAGES, {0: 0, 1: 0}, 1, 2, frees=True, layers=layers)
    (found,) = step_peaks(Schedule.of(["0F0 1F0 1B0 0B0"]), saving(300, 4), held)
    standing = {"shards": 75 + 20, "optimizer": 4, "buffers": 1}
    assert (found.column, found.most["activations"]) == (3, 304)
    assert found.parts == standing | {"weights": 40, "gradients": 15, "messages": 24, "activations": 300}
    (found,) = step_peaks(Schedule.of(["0F0 1F0 1B0 0B0"]), saving(300, 400), held)
    assert found.parts == standing | {"weights": 8, "gradients": 5, "messages": 6, "activations": 700}


@pytest.mark.parametrize(("row", "waiting"), [("0B0 0B1 0B2 0B3", 0), ("0B3 0B2 0B0 0B1", 2), ("0B3 0B2 0B1 0B0", 3)])
def test_gradients_that_come_early_wait_for_their_turn(row: str, waiting: int) -> None:
    table = Schedule.of(["0F0 0F1 0F2 0F3 " + row])
    state = [StateBytes((0,), (0,), weights=10, sums=20)]
    for in_order in (True, False):
        (whole,) = step_peaks(table, saving(0), held_bytes(state, {0: 0}, 1, in_order=in_order))
        assert whole.most["gradients"] == 20 + 10 * waiting * in_order
        (found,) = step_peaks(place_shards(table, 1), saving(0), held_bytes(state, {0: 0}, 1, 2, frees=True, in_order=in_order))
        assert found.most["gradients"] == 20 + 10 * waiting * in_order


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_rows_that_come_early_wait_in_the_dtype_of_the_sums(shards: int) -> None:
    """Where single layers are reduced, a rank's rows wait, also if one rank has all of them."""
    state = [StateBytes((0,), (0,), weights=10, sums=10, row_sums=20), StateBytes((0,), (0,), weights=3, row_sums=6, shards=1)]
    (held,) = held_bytes(state, {0: 0}, 1, shards, frees=True, layers={(0, Kind.B): LayerBytes(10, 10, 10)}, in_order=True)
    assert held.waiting == {0: -(-20 // shards) + 6}


@pytest.mark.parametrize("own", [1, 2, 3])
def test_averages_take_parts_by_the_ranks_that_have_the_same_parameters(own: int) -> None:
    """Up to two numbers add up in place: no rank receives parts then."""
    state = [StateBytes((0,), (0,), weights=10, sums=10), StateBytes((0,), (0,), weights=7, sums=7, averaged_over=own)]
    (whole,) = held_bytes(state, {0: 0}, 1, averaged_over=4)
    assert whole.averaged == {0: 10 + 7 * (own > 2)}
    (sharded,) = held_bytes(state, {0: 0}, 1, 1, averaged_over=4)
    assert sharded.averaged == whole.averaged and sharded.at_end == 0, "sums over copies start with the reductions"
    assert held_bytes(state, {0: 0}, 1)[0].averaged == {}


"""Read on rank 0 by stages 0 and 2, on rank 1 by stage 3."""


@given(tables())
@settings(deadline=None, max_examples=examples(60))
def test_any_table(table: tuple[Rows, int, int, Random]) -> None:
    """The kinds of bytes have their most at different times, so their sum is no less than the peak."""
    rows, stages, microbatches, random = table
    plain = Schedule.of(rows, stages=stages, microbatches=microbatches)
    costs = saving(*(random.randint(0, 9) for _ in range(stages)))
    costs = replace(costs, stages=tuple(replace(each, ahead=each) for each in costs.stages))
    state = [StateBytes((s,), (s,), weights=random.randint(0, 9), sums=random.randint(0, 9)) for s in range(stages)]
    placed = place_shards(plain, None)
    for peak in step_peaks(placed, costs, held_bytes(state, placed.rank_of_stage, placed.ranks, 3, frees=True)):
        assert max(peak.most.values()) <= peak.nbytes <= sum(peak.most.values())


def test_a_cap_names_the_rank_the_kinds_and_what_to_do() -> None:
    schedule = make_table("GPipe", 2, 2, 4)
    held = [HeldBytes({"weights": 100, "optimizer": 200}), HeldBytes({"weights": 10})]
    case = ScheduleUnderCheck(schedule, 2, 4)
    check_memory(case, saving(5, 5), [320, 30], held=held)
    with pytest.raises(ScheduleError, match=r"rank 1, column 4: 30 bytes .*\(10 of weights, 20 of activations\).* cap of 29"):
        check_memory(case, saving(5, 5), [320, 29], held=held)
    with pytest.raises(ScheduleError, match=r"rank 0, .* 320 bytes .*200 of optimizer.*recompute.*parallel\.keep.*optimizer"):
        check_memory(case, saving(5, 5), 319, held=held)
    with pytest.raises(ScheduleError, match="held has the bytes of 1 ranks, but 2 run 'GPipe'"):
        check_memory(case, saving(5, 5), 319, held=held[:1])


def test_bytes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ScheduleError, match="weights: take bytes, an integer from 0, got -1"):
        StateBytes((0,), weights=-1)
    with pytest.raises(ScheduleError, match="readers: take a tuple of stages, got 'a'"):
        StateBytes("a")  # type: ignore[arg-type]
    with pytest.raises(ScheduleError, match=r"shards: take a positive integer .* got 0"):
        StateBytes((0,), shards=0)
    with pytest.raises(ScheduleError, match="some of the stages that read"):
        StateBytes((0,), (1,))


def test_a_table_that_is_read_once_serves_further_costs_of_its_kind() -> None:
    table = Schedule.of(["0F0 0F1 1F0 1B0 1F1 1B1 0B0 0B1"])
    memory, state = StepMemory(table), held_bytes(STAGES, {0: 0, 1: 0}, 1)
    for costs in (saving(3, 4), saving(300, 4)):
        assert memory.peaks([costs], state) == step_peaks(table, costs, state)
    for other in (replace(saving(3, 4), flow=MessageFlow(kept=1)), replace(saving(3, 4), woven=False)):
        with pytest.raises(ScheduleError, match="read for another flow"):
            memory.peaks([other], state)
    with pytest.raises(ScheduleError, match="or no single layers"):
        memory.peaks([saving(3, 4)], [HeldBytes(layers={(0, Kind.F): LayerBytes(1)})])
    with pytest.raises(ScheduleError, match="has 2 stages, the costs are of 3"):
        memory.peaks([saving(1, 2, 3)])
    with pytest.raises(ScheduleError, match="held has the bytes of 2 ranks, but 1 run"):
        memory.peaks([saving(3, 4)], [*state, *state])
