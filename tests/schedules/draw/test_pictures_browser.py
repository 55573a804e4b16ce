"""The pictures in a real browser: every box is laid out as drawn, and the pixels are not blank.

Needs Chromium (Debian: `apt-get install chromium`); skipped without it. The test adds a script that measures the page; the
pages themselves have no script.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import zlib
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


def browse(page: Path, profile: Path, *what: str) -> str:
    """Run Chromium on a page, without a network and in a fresh profile; returns its output."""
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=1"]
    command = [BROWSER, *options, f"--user-data-dir={profile}", *what, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout


def laid_out(timeline: Timeline, folder: Path, *below: Timeline) -> list[dict[str, Any]]:
    """Every box, text and curve, as the browser has placed it."""
    page = folder / "page.html"
    page.write_text(graphpp.html(timeline, *below).replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    reader = Measured()
    reader.feed(browse(page, folder / "profile", "--dump-dom"))
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


def pixels(png: bytes) -> Counter[bytes]:
    """The number of pixels of each colour of a PNG with eight bits a channel, by its specification (filters of RFC 2083)."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data = 8, b""
    width = depth = 0
    while at < len(png):
        length, kind = struct.unpack(">I4s", png[at : at + 8])
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            width, _, bits, colour = struct.unpack(">IIBB", body[:10])
            assert bits == 8
            depth = {2: 3, 6: 4}[colour]
        data += body if kind == b"IDAT" else b""
        at += 12 + length
    return counted(zlib.decompress(data), width * depth, depth)


def counted(raw: bytes, stride: int, depth: int) -> Counter[bytes]:
    found: Counter[bytes] = Counter()
    above = bytearray(stride)
    for start in range(0, len(raw), stride + 1):
        row = bytearray(raw[start + 1 : start + 1 + stride])
        for i in range(stride):
            left, corner = (row[i - depth], above[i - depth]) if i >= depth else (0, 0)
            row[i] = (row[i] + predicted(raw[start], left, above[i], corner)) & 255
        found.update(bytes(row[i : i + 3]) for i in range(0, stride, depth))
        above = row
    return found


def predicted(method: int, left: int, up: int, corner: int) -> int:
    if method == 4:
        return min((left, up, corner), key=lambda value: abs(left + up - corner - value))
    return (0, left, up, (left + up) // 2)[method]


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


def test_the_screenshot_has_the_colours(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.html", tmp_path / "page.png"
    page.write_text(graphpp.html(placed(make_table("1F1B", 4, 4, 8))), encoding="utf-8")
    browse(page, tmp_path / "profile", f"--screenshot={picture}", "--window-size=900,400")
    seen = pixels(picture.read_bytes())
    found = laid_out(placed(make_table("1F1B", 4, 4, 8)), tmp_path)
    fills = {each["fill"] for each in found if each["kind"] in ("F", "B", "idle")}
    assert len(fills) == 3
    for fill in fills:
        colour = bytes(int(number) for number in fill.removeprefix("rgb(").removesuffix(")").split(", "))
        assert seen[colour] > 2000, f"{fill} is hardly there"


def test_names_stay_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)> & \"1F1B\" </title></svg>"
    timeline = placed(replace(make_table("1F1B", 2, 2, 2), name=name))
    found = laid_out(timeline, tmp_path)
    assert any(name in each["text"] for each in found if each["tag"] == "text")
    assert sum(each["kind"] in ("F", "B") for each in found) == 8
