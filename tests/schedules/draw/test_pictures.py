"""SVG and traces: well-formed, to scale, no box over another, every name escaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

import graphpp
from graphpp.errors import GraphPPError, ScheduleError
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import named
from tests.schedules.timelines import placed

SVG = "{http://www.w3.org/2000/svg}"
EVIL = "µ<b a='1'>\"&amp;\x00\x1b]]>\ud800 --> 1F1B"
DUAL = Schedule.of(["0F0 0F1 3F0 3I0 3W0 (3F1;0B0)OVERLAP_F_B 3B1 0B1", "1F0 2F0 1F1 2B0 (2F1;1B0)OVERLAP_F_B 2B1 1B1"])


def elements(svg: str, tag: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}{tag}"))


def boxes(svg: str, kinds: str = "F|B|I|W") -> list[dict[str, float]]:
    """Position and size of the rectangles of some classes, in the order drawn."""
    rects = [rect for rect in elements(svg, "rect") if re.fullmatch(kinds, rect.get("class", ""))]
    return [{name: float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")} for rect in rects]


def texts(svg: str) -> list[str]:
    return [text.text or "" for text in elements(svg, "text")]


@settings(max_examples=examples(30))
@given(named())
def test_boxes_are_to_scale_and_apart(schedule: Schedule) -> None:
    timeline = placed(schedule)
    svg = graphpp.svg(timeline, width=3000)
    events = [event for event in timeline.events for _ in event.action.leaves]
    drawn = boxes(svg)
    assert len(drawn) == len(events)
    left, right = min(box["x"] for box in drawn), max(box["x"] + box["width"] for box in drawn)
    per_unit = (right - left) / timeline.makespan
    for box, event in zip(drawn, events, strict=True):
        assert box["width"] == pytest.approx(event.duration * per_unit, abs=0.02)
        assert box["x"] - left == pytest.approx(event.start * per_unit, abs=0.02)
    for rank in range(schedule.ranks):
        row = [(box, event) for box, event in zip(drawn, events, strict=True) if event.rank == rank]
        spans = sorted({(box["x"], box["width"]) for box, _ in row})  # the halves of an overlap share theirs
        assert all(x + width <= after + 0.03 for (x, width), (after, _) in pairwise(spans))
        assert len({box["y"] for box, event in row if not event.action.parts}) <= 1


def test_all_boxes_lie_within_the_picture() -> None:
    for schedule in (make_table("1F1B", 16, 16, 40), make_table("Interleaved1F1B", 4, 32, 8), make_table("1F1B", 1, 1, 1)):
        for width in (None, 300, 900, 5000):
            svg = graphpp.svg(placed(schedule), width=width)
            root = ElementTree.fromstring(svg)
            wide, high = (float(root.get(name, "nan")) for name in ("width", "height"))
            assert width is None or wide == width
            assert root.get("viewBox") == f"0 0 {root.get('width')} {root.get('height')}"
            assert all(box["x"] >= 0 and box["x"] + box["width"] <= wide + 0.02 for box in boxes(svg, ".+"))
            assert all(box["y"] >= 0 and box["y"] + box["height"] <= high for box in boxes(svg, ".+"))


def test_stages_of_a_rank_have_shades_and_kinds_have_hues() -> None:
    rects = elements(graphpp.svg(placed(DUAL)), "rect")
    fills = {(rect.get("class"), rect.get("fill")) for rect in rects if rect.get("class") in list(Kind)}
    assert len(fills) == len({fill for _, fill in fills})
    assert sorted(kind for kind, _ in fills if kind) == ["B", "B", "F", "F", "I", "W"]


def test_two_timelines_share_the_axis() -> None:
    fast = placed(make_table("1F1B", 2, 2, 4))
    slow = replace(placed(make_table("1F1B", 2, 2, 4), lambda _: 2.0), name="twice as slow")
    together = boxes(graphpp.svg(fast, slow))
    alone, below = together[: len(together) // 2], together[len(together) // 2 :]
    assert max(box["y"] for box in alone) < min(box["y"] for box in below)
    for above, under in zip(alone, below, strict=True):
        assert under["width"] == pytest.approx(2 * above["width"], abs=0.02)
    assert any("twice as slow" in text for text in texts(graphpp.svg(fast, slow)))


def test_seconds_and_units_do_not_share_an_axis() -> None:
    table = make_table("1F1B", 2, 2, 4)
    with pytest.raises(GraphPPError, match="'units' and 's'"):
        graphpp.svg(placed(table), placed(table, unit="s"))


def test_titles_say_action_start_end_and_duration() -> None:
    timeline = placed(make_table("1F1B", 2, 2, 2), lambda _: 0.0025, "s")
    titles = [title.text for title in elements(graphpp.svg(timeline), "title")]
    assert "1F0 on rank 1\nstart 2.5 ms\nend 5 ms\nduration 2.5 ms" in titles
    assert len(titles) == 8


def test_memory_is_drawn_where_it_was_followed() -> None:
    timeline = placed(make_table("1F1B", 3, 3, 5))
    with_memory, without = graphpp.svg(timeline), graphpp.svg(replace(timeline, memory=()))
    paths = [path.get("d", "") for path in elements(with_memory, "path")]
    assert len(paths) == 3 and "bytes alive" in texts(with_memory)
    assert "<path" not in without and "bytes alive" not in texts(without)
    heights = [[float(y) for y in re.findall(r"V([0-9.]+)", path)] for path in paths]
    # The base line is the last height; rank 0 holds three microbatches, rank 2 one.
    assert heights[0][-1] - min(heights[0]) == pytest.approx(3 * (heights[2][-1] - min(heights[2])), abs=0.05)


def test_names_are_escaped_everywhere() -> None:
    table = replace(make_table("1F1B", 2, 2, 2), name=EVIL)
    timeline = replace(placed(table), name=EVIL, unit="<i>&")
    assert not elements(graphpp.svg(timeline), "b") and any("<b a='1'>" in text for text in texts(graphpp.svg(timeline)))
    assert (graphpp.svg(timeline) + graphpp.chrome_trace(timeline)).isascii()  # safe in a file of any encoding
    json.loads(graphpp.chrome_trace(timeline))


def events_of(timeline: Timeline, *more: Timeline) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads(graphpp.chrome_trace(timeline, *more))["traceEvents"]
    return found


def test_a_trace_has_every_event_in_microseconds() -> None:
    timeline = placed(make_table("Interleaved1F1B", 2, 4, 4), lambda _: 0.5, "s")
    complete = [event for event in events_of(timeline) if event["ph"] == "X"]
    assert [event["name"] for event in complete] == [str(event.action) for event in timeline.events]
    assert {event["dur"] for event in complete} == {5e5}
    assert [event["ts"] for event in complete] == [event.start * 1e6 for event in timeline.events]
    assert complete[0]["args"] == {"stage": 0, "kind": "F", "microbatch": 0}
    names = {(event["pid"], event["tid"]): event["args"] for event in events_of(timeline) if event["name"] == "thread_name"}
    assert len(names) == 4 and all((event["pid"], event["tid"]) in names for event in complete)


def test_a_trace_counts_bytes_and_tells_timelines_apart() -> None:
    first, second = placed(DUAL), replace(placed(DUAL), name="other")
    counters = [event for event in events_of(first) if event["ph"] == "C"]
    assert [event["args"]["bytes"] for event in counters] == [count for row in first.memory for _, count in row]  # type: ignore[index]
    processes = [e["args"]["name"] for e in events_of(first, second) if e["name"] == "process_name"]  # type: ignore[index]
    assert processes == ["placed, rank 0", "placed, rank 1", "other, rank 0", "other, rank 1"]
    pids = [event["pid"] for event in events_of(first, second) if event["ph"] == "X"]
    assert len(set(pids)) == 4


def test_a_schedule_draws_itself_at_unit_costs() -> None:
    table = make_table("Interleaved1F1B", 2, 4, 4)
    svg = graphpp.svg(table)
    assert len(boxes(svg)) == sum(action.is_compute for _, _, action in table.cells())
    assert "time in units" in texts(svg) and len(elements(svg, "path")) == 2
    widths = {round(box["width"] / boxes(svg, "F")[0]["width"], 1) for box in boxes(svg)}
    assert widths == {1.0, 2.0}  # B is I and W
    assert ElementTree.fromstring(graphpp.svg(table, width=700)).get("width") == "700"


def test_a_table_that_cannot_run_is_refused() -> None:
    with pytest.raises(ScheduleError):
        graphpp.svg(Schedule.of(["0B0 0F0", "1F0 1B0"]))


def test_the_parts_of_an_overlap_share_its_width_and_messages_lie_at_the_foot_of_the_row() -> None:
    upper, lower = (box for box in boxes(graphpp.svg(placed(Schedule.of(["0F0 0F1 1F0 (1F1;1B0)OVERLAP_F_B 1B1 0B0 0B1"])))) if
                    box["height"] < 26)  # fmt: skip
    assert (upper["x"], upper["width"]) == (lower["x"], lower["width"])
    assert (upper["height"], lower["y"]) == (13, upper["y"] + 13)
    costs = replace(graphpp.Costs.unit(2, 2, send=0.5), blocking=True)
    svg = graphpp.svg(graphpp.simulate(make_table("1F1B", 2, 2, 2), costs))
    feet = {box["y"] + box["height"] for box in boxes(svg, "message")}
    assert feet == {box["y"] + box["height"] for box in boxes(svg, "idle")} and {"waits to send", "idle"} <= {*texts(svg)}
