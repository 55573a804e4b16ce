"""The pictures in a real browser: every box is laid out as drawn.

Needs Chromium (Debian: `apt-get install chromium`); skipped without it. The test puts a picture into a page with a script that
measures it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

import graphpp
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.timelines import placed

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next((path for path in map(shutil.which, NAMES) if path), None)
MISSING = f"no browser to look at the pictures with: none of {', '.join(NAMES)} is on the PATH"
pytestmark = pytest.mark.skipif(BROWSER is None, reason=MISSING)

OVERLAPPED = Schedule.of(
    ["0F0 0F1 3F0 3I0 3W0 (3F1;0B0)OVERLAP_F_B 3B1 0B1", "1F0 2F0 1F1 2B0 (2F1;1B0)OVERLAP_F_B 2B1 1B1"], name="overlaps"
)
MEASURE = """<pre id="measured"></pre><script>
const found = [...document.querySelectorAll("svg rect[class], svg text, svg path")].map(each => {
  const box = each.getBoundingClientRect();
  const title = each.querySelector("title");
  return {tag: each.tagName, kind: each.getAttribute("class"), text: title ? title.textContent : each.textContent,
          fill: getComputedStyle(each).fill, x: box.x, y: box.y, width: box.width, height: box.height};
});
document.getElementById("measured").textContent = JSON.stringify(found);
</script>"""


class Measured(HTMLParser):
    """The text that the measuring script wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = False
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = self.inside or ("id", "measured") in attrs

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "pre"

    def handle_data(self, data: str) -> None:
        self.text += data if self.inside else ""


def laid_out(timeline: Timeline, folder: Path, *below: Timeline) -> list[dict[str, Any]]:
    """Every box, text and curve, as the browser has placed it."""
    page = folder / "page.html"
    page.write_text(f"<!DOCTYPE html><meta charset=utf-8><body>{graphpp.svg(timeline, *below)}{MEASURE}</body>")
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    reader = Measured()
    reader.feed(subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout)
    found: list[dict[str, Any]] = json.loads(reader.text)
    return found


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    return all(
        inner[at] >= outer[at] - 0.5 and inner[at] + inner[size] <= outer[at] + outer[size] + 0.5
        for at, size in (("x", "width"), ("y", "height"))
    )


def overlap(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        one[at] + one[size] > other[at] + 0.5 and other[at] + other[size] > one[at] + 0.5
        for at, size in (("x", "width"), ("y", "height"))
    )


def test_every_action_has_its_box_where_it_belongs(tmp_path: Path) -> None:
    timeline = placed(OVERLAPPED)
    found = laid_out(timeline, tmp_path)
    boxes = [each for each in found if each["kind"] in ("F", "B", "I", "W")]
    names = Counter(each["text"].split(" on rank ")[0] for each in boxes)
    assert names == Counter(str(event.action) for event in timeline.events for _ in event.action.leaves)
    assert all(each["width"] > 5 and each["height"] > 5 for each in boxes)
    assert not any(overlap(one, other) for one, other in combinations(boxes, 2))
    assert all("duration" in each["text"] for each in boxes)


@pytest.mark.parametrize(
    ("ranks", "stages", "microbatches"), [(2, 2, 2), (4, 16, 8), (16, 16, 40)], ids=["small", "interleaved", "wide"]
)
def test_no_text_lies_on_another(tmp_path: Path, ranks: int, stages: int, microbatches: int) -> None:
    timeline = replace(placed(make_table("auto", ranks, stages, microbatches), lambda _: 0.0123, "s"), name="measured")
    found = laid_out(timeline, tmp_path, replace(timeline, name="simulated"))
    texts = [each for each in found if each["tag"] == "text" and each["text"]]
    assert [(a["text"], b["text"]) for a, b in combinations(texts, 2) if overlap(a, b)] == []
    (page,) = [each for each in found if each["kind"] == "page"]
    assert [each["text"] for each in found if not within(each, page)] == []


def test_numbers_lie_within_their_boxes(tmp_path: Path) -> None:
    found = laid_out(placed(make_table("1F1B", 4, 4, 12)), tmp_path)
    boxes = [each for each in found if each["kind"] in ("F", "B")]
    for box in boxes:
        (number,) = [each for each in found if each["tag"] == "text" and overlap(each, box)]
        assert number["text"] == box["text"].split()[0].lstrip("0123")[1:]
        assert within(number, {**box, "y": box["y"] - 2, "height": box["height"] + 4})
