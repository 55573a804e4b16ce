"""The parts of a page: thinned data keep their peaks, wrong data are refused."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan

import pytest

from graphpp.errors import GraphPPError
from graphpp.report.chart_data import chart_data
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import Page, PlanEntry
from graphpp.report.run_view import RunView
from graphpp.report.tables import moment_table
from graphpp.report.timeline_view import KINDS, TimelineView
from graphpp.units import spell_bytes, spell_time
from tests.report.samples import memory, timeline


def test_every_computation_has_its_box() -> None:
    found = timeline("1F1B", 4, 4, 6)
    view = TimelineView.of(found)
    boxes = {(box.rank, KINDS[box.kind], box.stage, box.microbatch): box for box in view.boxes if box.kind < 4}
    events = [event for event in found.events if event.action.is_compute]
    assert len(boxes) == len(events) == 48
    for event in events:
        box = boxes[event.rank, event.action.kind.value, event.action.stage, event.action.microbatch or 0]
        assert (box.start, box.duration) == (event.start, event.duration)
    assert {KINDS[box.kind] for box in view.boxes} == {"F", "B", "send", "receive"}
    assert view.idle == pytest.approx(sum(map(found.bubble, range(4))) / 4)


def test_an_empty_timeline_is_refused() -> None:
    with pytest.raises(GraphPPError, match="has no events"):
        TimelineView.of(replace(timeline("1F1B", 2, 2, 2), events=()))


def test_a_thinned_curve_keeps_its_peak_and_its_ends() -> None:
    curve = [(float(at), {"activations": 10 + at % 7, "weights": 5}) for at in range(50_000)]
    curve[31_337] = (31_337.0, {"activations": 1_000, "weights": 5})
    view = MemoryView.of([curve, curve[:3]])
    long, short = view.ranks
    assert view.kinds == ("weights", "activations")
    assert 5_000 < len(long.times) <= 10_002 and len(short.times) == 3
    assert long.peak == (5, 1_000) and long.together == 1_005 and max(long.curves[1]) == 1_000
    assert (long.times[0], long.times[-1]) == (0.0, 49_999.0) and list(long.times) == sorted(long.times)


@pytest.mark.parametrize(("microbatches", "whole"), [(4, True), (100, False)])
def test_the_table_of_the_moments_has_the_numbers_of_the_curves(microbatches: int, whole: bool) -> None:
    view = memory(timeline("1F1B", 4, 4, microbatches), None)
    table = moment_table(view)
    assert [column.name for column in table.columns] == ["rank", "time", *view.kinds, "together"]
    assert not table.more and ("with most bytes" in table.caption) is not whole
    for each in view.ranks:
        rows = [row[1:] for row in table.rows if row[0] == str(each.rank)]
        curve = [
            (spell_time(time, view.unit), *map(spell_bytes, parts), spell_bytes(sum(parts)))
            for time, parts in zip(each.times, zip(*each.curves, strict=True), strict=True)
        ]
        assert rows == curve if whole else set(rows) < set(curve) and len(rows) > 50
        assert (rows[0], rows[-1]) == (curve[0], curve[-1])
        assert any(row[1:] == (*map(spell_bytes, each.peak), spell_bytes(each.together)) for row in rows)


def test_caps_fit_the_ranks_and_may_be_missing() -> None:
    simulated = timeline("1F1B", 2, 2, 4)
    assert [each.cap for each in memory(simulated, None).ranks] == [None, None]
    assert [each.cap for each in memory(simulated, [7, 8]).ranks] == [7, 8]
    with pytest.raises(GraphPPError, match="each of 2 ranks, got 1"):
        memory(simulated, [7])
    with pytest.raises(GraphPPError, match="rank 1 has none"):
        MemoryView.of([[(0.0, {"weights": 1})], []])


def test_the_front_joins_plans_that_fit_from_the_fastest_to_the_smallest() -> None:
    plans = [PlanEntry("a", 3, 30, on_front=True), PlanEntry("b", 1, 50, on_front=True), PlanEntry("c", 2, 50)]
    data, _ = chart_data(Page(plans=(*plans, PlanEntry("f", 0.5, 90, fits=False, on_front=True))))
    assert data["front"] == [1, 0]


@pytest.mark.parametrize(("seconds", "nbytes"), [(-1, 0), (nan, 0), (inf, 0), (1, -1)])
def test_a_plan_with_impossible_numbers_is_refused(seconds: float, nbytes: int) -> None:
    with pytest.raises(GraphPPError, match="plan 'x': take finite seconds and bytes"):
        PlanEntry("x", seconds, nbytes)


@pytest.mark.parametrize("wrong", ["12", [None], [object()], 7])
def test_what_is_no_list_of_numbers_is_refused(wrong: object) -> None:
    with pytest.raises(GraphPPError, match="losses: take a list of numbers"):
        RunView.of(wrong)  # type: ignore[arg-type]


def test_negative_seconds_are_refused() -> None:
    with pytest.raises(GraphPPError, match="seconds: a step takes 0 seconds or more, got -1"):
        RunView.of(seconds=[1, -1])
