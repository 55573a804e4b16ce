"""The page as a file: sections, escapes, tables, and data that read back as they were."""

from __future__ import annotations

import base64
import errno
import gzip
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest

from graphpp.errors import GraphPPError
from graphpp.report.page import Page
from graphpp.report.page_html import page_html, write_page
from graphpp.report.run_view import RunView
from graphpp.report.timeline_view import KINDS, TimelineView
from tests.report.samples import NASTY, full_page, plans, timeline

SECTIONS = ["plans", "pair", "timeline", "memory", "stages", "boundaries", "run"]
CLOSED = {"table", "caption", "thead", "tbody", "tr", "th", "td", "section", "details", "summary", "div", "dl", "main", "nav"}


class Read(HTMLParser):
    """The elements of a page, and the texts in them; scripts and styles stay closed to it as they do to a browser."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.depth: dict[str, int] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.depth[tag] = self.depth.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        self.depth[tag] = self.depth.get(tag, 0) - 1

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def ids(self, tag: str) -> list[str | None]:
        return [attrs.get("id") for found, attrs in self.tags if found == tag]


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def column(text: str, place: dict[str, Any]) -> list[float]:
    packed = re.search(r'id="columns">(.*?)</script>', text)
    assert packed is not None
    block = gzip.decompress(base64.b64decode(packed[1]))
    values: list[float] = numpy.frombuffer(block, f"<{place['type']}", place["count"], place["at"]).tolist()
    return values


def test_a_full_page_has_every_section_and_closes_its_elements() -> None:
    read = Read(page_html(full_page()))
    assert read.ids("section") == SECTIONS
    assert {tag: depth for tag, depth in read.depth.items() if tag in CLOSED and depth} == {}
    headings = [int(tag[1]) for tag, _ in read.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1 and all(after - before <= 1 for before, after in pairwise(headings))


@pytest.mark.parametrize("part", ["timelines", "memory", "stages", "boundaries", "plans", "run"])
def test_a_part_without_data_leaves_its_section_out(part: str) -> None:
    own = {"plans": ["plans", "pair", "timeline"], "timelines": ["timeline"]}.get(part, [part])
    read = Read(page_html(replace(full_page(), **{part: getattr(Page(), part)})))
    assert read.ids("section") == [each for each in SECTIONS if each == "timeline" or each not in own]
    assert Read(page_html(replace(Page(), **{part: getattr(full_page(), part)}))).ids("section") == own


def test_what_was_asked_stands_above_what_was_found() -> None:
    read = Read(page_html(replace(full_page(), asked=(("model", "Llama"), ("batch", "512 rows")))))
    assert [attrs["aria-label"] for tag, attrs in read.tags if attrs.get("class") == "facts"] == ["Asked", "Found"]
    assert read.texts.index("512 rows") < read.texts.index("Interleaved1F1B")


def test_the_table_of_plans_can_be_ordered_and_has_the_readers_own_layout_on_top() -> None:
    text = page_html(full_page())
    read = Read(text)
    heads = [attrs["data-sort"] for _, attrs in read.tags if "data-sort" in attrs]
    assert heads == ["", "pp", "schedule", "step", "memory"] and "Equal in all plans: tp 1." in text
    assert [attrs["aria-sort"] for _, attrs in read.tags if "aria-sort" in attrs] == ["ascending"]
    rows = [attrs for _, attrs in read.tags if "data-plan" in attrs]
    assert [row["data-plan"] for row in rows] == ["5", "0", "1", "2", "3", "4"]
    assert [row.get("class") for row in rows] == ["yours", *[None] * 5]
    alone = page_html(Page(plans=plans()[:1]))
    assert [name for name in re.findall('data-sort="(.*?)"', alone) if name] == ["pp", "tp", "schedule", "step", "memory"]


def test_plans_have_the_numbers_by_which_two_are_compared_and_their_steps() -> None:
    text = page_html(full_page())
    data = data_of(text)
    compared = json.loads(bytes(map(int, column(text, data["compared"]))))
    for plan, each, shown in zip(plans(), compared, data["plans"], strict=True):
        assert [tuple(number) for number in each["numbers"]] == list(plan.numbers)
        assert each["texts"] == {**plan.texts, "reason": plan.reason or "best"}
        assert list(map(list, each["parts"].values())) == [["forward", "bubble"], ["weights", "activations"]]
        assert shown["values"] == {cell.name: cell.value for cell in (*plan.choices, *plan.results)}
        if plan.timeline is not None:
            assert column(text, shown["timeline"]["busy"]) == [rank.busy for rank in plan.timeline.ranks]
            assert shown["timeline"]["whole"] is plan.timeline.whole
    assert [plan["timeline"] is None for plan in data["plans"]] == [False] * 5 + [True]


def test_equal_pages_give_equal_text() -> None:
    assert page_html(full_page()) == page_html(full_page())


def test_an_empty_page_says_so() -> None:
    read = Read(page_html(Page()))
    assert read.ids("section") == []
    assert any("no data" in text for text in read.texts)


def test_texts_of_users_stay_texts() -> None:
    text, plain = page_html(full_page(word=NASTY)), page_html(full_page(word="harmless"))
    assert "<img src=x" not in text
    assert text.count("</script>") == plain.count("</script>")
    read, expected = Read(text), Read(plain)
    assert [tag for tag, _ in read.tags] == [tag for tag, _ in expected.tags]
    assert any(NASTY in each for each in read.texts)
    names = [[name for name in attrs if name != "aria-label"] for _, attrs in read.tags]
    assert names == [[name for name in attrs if name != "aria-label"] for _, attrs in expected.tags]
    assert data_of(text)["plans"][0]["name"].endswith(NASTY)


def test_no_file_of_the_page_ends_its_own_element() -> None:
    assets = Path(page_html.__code__.co_filename).parent / "assets"
    for path in assets.rglob("*.js"):
        assert "</script" not in path.read_text(encoding="utf-8").lower()
        assert "<!--" not in path.read_text(encoding="utf-8")


def test_the_page_names_nothing_outside_of_itself() -> None:
    page = re.sub(r"<(script|style|pre)\b.*?</\1>", "", page_html(full_page()), flags=re.DOTALL)
    assert "default-src 'none'" in page
    assert {target[:1] for target in re.findall(r"(?:src|href|action)=[\"']?([^\s>\"']*)", page)} == {"#"}
    assert "http" not in re.sub(r"http-equiv", "", page)


def test_every_chart_has_a_label_and_every_table_a_caption_and_heads() -> None:
    read = Read(page_html(full_page()))
    charts = [attrs for tag, attrs in read.tags if attrs.get("class") == "chart"]
    assert len(charts) == 12
    assert "Table: Over the time of a step" in "".join(read.texts)
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in charts)
    tags = [tag for tag, _ in read.tags]
    assert tags.count("table") == tags.count("caption") == tags.count("thead") >= 9
    assert all("scope" in attrs for tag, attrs in read.tags if tag == "th")


def test_the_boxes_of_a_timeline_read_back() -> None:
    view = TimelineView.of(timeline("ZBVZeroBubble", 2, 4, 4))
    text = page_html(Page(timelines=(view,)))
    (data,) = data_of(text)["timelines"]
    assert data["rows"][-1] == len(view.boxes)
    for rank in range(2):
        own = [box for box in view.boxes if box.rank == rank]
        assert data["rows"][rank + 1] - data["rows"][rank] == len(own)
    for name, place in data["columns"].items():
        assert column(text, place) == pytest.approx([getattr(box, name) for box in view.boxes], rel=1e-6)
    assert data_of(text)["kinds"] == list(KINDS)


def test_losses_that_are_not_finite_read_back_as_they_are() -> None:
    text = page_html(Page(run=RunView.of([1.0, float("nan"), float("inf")], [0.5, 0.25, 0.125])))
    assert str(column(text, data_of(text)["losses"]["values"])) == "[1.0, nan, inf]"
    assert "nan" in Read(text).texts


def test_a_page_is_written_whole_into_a_new_folder(tmp_path: Path) -> None:
    path = write_page(Page(title="größer"), tmp_path / "a" / "b" / "page.html")
    assert "größer" in path.read_text(encoding="utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["page.html"]


def test_a_place_that_cannot_be_written_is_refused_and_left_clean(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphPPError, match="give a folder that can be written"):
        write_page(Page(), tmp_path / "file" / "page.html")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(GraphPPError, match="give a folder that can be written"):
        write_page(Page(), tmp_path / "page.html")
    with pytest.MonkeyPatch.context() as full, pytest.raises(GraphPPError, match="No space left"):
        full.setattr(Path, "write_text", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
        write_page(Page(), tmp_path / "other.html")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "page.html"]
