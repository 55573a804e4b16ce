"""The page in a real browser: charts are painted and answer to the pointer, the keys and the controls; nothing is loaded.

Needs Chromium (Debian: `apt-get install chromium`) and the Python package `playwright`; skipped without them. Colours are read
from the canvas of a chart, pixel by pixel. `make test` paints the charts; `make test-all` operates them.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from graphpp.report.page import Page
from graphpp.report.page_html import write_page
from graphpp.report.timeline_view import TimelineView
from tests.report.samples import MIB, NASTY, big_timeline, full_page, memory

playwright = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
BROWSER = next((path for path in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if path), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser to look at the page with: apt-get install chromium")

SLOW = 120.0  # seconds in which a browser answers on a busy machine
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
CHARTS = [
    "plan-front", "plan-bars", "timeline-0", "timeline-1", "timeline-A", "memory-peaks", "memory-time", "stage-bars",
    "boundary-bars", "run-losses", "run-seconds",
]  # fmt: skip
COLOURS = """id => {
  const canvas = document.querySelector(`#${id} canvas`);
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  const seen = new Set();
  for (let at = 0; at < pixels.length; at += 4) {
    if (pixels[at + 3]) seen.add(pixels[at] << 16 | pixels[at + 1] << 8 | pixels[at + 2]);
  }
  return seen.size;
}"""
CHART = "report.charts.find(each => each.element.id === '{}').chart"
ZOOM = f"() => (({{start, end}}) => [start, end])({CHART.format('timeline-0')}.getOption().dataZoom[0])"


class Shown:
    """A page in the browser, with what went wrong in it."""

    def __init__(self, context: Any, path: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page = context.new_page()
        self.page.on("console", lambda each: self.errors.append(each.text) if each.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached")
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")  # painted

    def painted(self, chart: str) -> int:
        """How many colours a chart has."""
        colours: int = self.page.evaluate(COLOURS, chart)
        return colours

    def zoom(self) -> list[float]:
        """The range of the first timeline that is shown, in per cent of the step."""
        found: list[float] = self.page.evaluate(ZOOM)
        return found

    def has_theme(self, theme: str) -> bool:
        """Wait until the page has a theme; returns whether the page's background is that of the theme."""
        self.page.wait_for_selector(f"html[data-theme={theme}]", state="attached")
        background = self.page.eval_on_selector("body", "each => getComputedStyle(each).backgroundColor")
        return bool(background == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 24, 29)"}[theme])

    def picture(self, chart: str) -> bytes:
        """The pixels of a chart."""
        pixels: bytes = self.page.locator(f"#{chart} canvas").screenshot()
        return pixels


def until(holds: Callable[[], bool], seconds: float = SLOW) -> bool:
    """Wait until something holds that the browser does in its own time; False if it never does."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def context() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=BROWSER, args=FLAGS, timeout=SLOW * 1000)
        context = browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)
        context.set_default_timeout(SLOW * 1000)
        yield context
        browser.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(full_page(), tmp_path_factory.mktemp("page") / "page.html")


@pytest.fixture
def shown(context: Any, path: Path) -> Iterator[Shown]:
    shown = Shown(context, path)
    yield shown
    assert shown.errors == []
    assert shown.requests == [path.as_uri()]
    shown.page.close()


def box_of(shown: Shown, microbatch: int) -> tuple[float, float]:
    """A point within the first timeline's box of a microbatch's first forward, on the page."""
    x, y = shown.page.evaluate(
        """microbatch => {
          const { chart, boxes } = report.timelines.views[0];
          const at = boxes.microbatch.findIndex((each, at) => each === microbatch && boxes.kind[at] === 0);
          const rank = boxes.rows.findIndex((_, rank) => at < boxes.rows[rank + 1]);
          const [x, y] = chart.convertToPixel({ gridIndex: 0 }, [boxes.start[at] + boxes.duration[at] / 2, rank]);
          const place = chart.getDom().getBoundingClientRect();
          return [place.x + x, place.y + y];
        }""",
        microbatch,
    )
    return x, y


def test_every_chart_is_painted(shown: Shown) -> None:
    found = {chart: shown.painted(chart) for chart in CHARTS}
    assert {chart: colours for chart, colours in found.items() if colours < 4} == {}
    assert shown.page.locator(".loading:visible").count() == 0


@pytest.mark.exhaustive
def test_buttons_keys_and_the_wheel_zoom_all_timelines(shown: Shown) -> None:
    assert shown.zoom() == [0, 100]
    shown.page.click("[data-zoom=in]")
    assert shown.zoom() == [25, 75]
    assert shown.page.evaluate(f"{CHART.format('timeline-1')}.getOption().dataZoom[0].end") == 75
    shown.page.click("[data-zoom=right]")
    assert shown.zoom() == [37.5, 87.5]
    shown.page.focus("#timeline-0")
    shown.page.keyboard.press("Home")
    assert shown.zoom() == [0, 100]
    shown.page.keyboard.press("+")
    shown.page.keyboard.press("ArrowLeft")
    assert shown.zoom() == [12.5, 62.5]
    shown.page.click("[data-zoom=all]")
    shown.page.mouse.move(*box_of(shown, 2))
    shown.page.keyboard.down("Control")
    shown.page.mouse.wheel(0, -300)
    shown.page.keyboard.up("Control")
    assert until(lambda: 0 < shown.zoom()[1] - shown.zoom()[0] < 100)


@pytest.mark.exhaustive
def test_the_pointer_shows_an_action_and_a_click_selects_its_microbatch(shown: Shown) -> None:
    before = shown.picture("timeline-1")
    shown.page.mouse.move(*box_of(shown, 2))
    tip = shown.page.locator("#tip")
    tip.wait_for()
    assert tip.inner_text().splitlines()[:2] == ["0F2  forward", "stage 0, microbatch 2"]
    shown.page.mouse.click(*box_of(shown, 2))
    assert shown.page.input_value("#microbatch") == "2"
    said = shown.page.inner_text("#selection")
    assert said.startswith("simulated: microbatch 2 has 16 actions on 4 ranks, from ") and "measured: microbatch 2" in said
    assert shown.page.locator("#path tbody tr").count() == 16 + 16 + 4  # of plan A, too
    assert until(lambda: shown.picture("timeline-1") != before)
    shown.page.click("#microbatch-none")
    shown.page.mouse.move(0, 0)
    assert shown.page.inner_text("#selection") == "" and not shown.page.locator("#path").is_visible()
    assert until(lambda: shown.picture("timeline-1") == before)


@pytest.mark.exhaustive
def test_the_theme_follows_the_system_and_the_switch(shown: Shown) -> None:
    assert shown.has_theme("light")
    shown.page.emulate_media(color_scheme="dark")
    assert shown.has_theme("dark")
    shown.page.select_option("#theme", "light")
    assert shown.has_theme("light")
    shown.page.click("[data-zoom=in]")
    light = shown.picture("memory-peaks")
    shown.page.select_option("#theme", "dark")
    assert shown.has_theme("dark")
    assert until(lambda: shown.picture("memory-peaks") != light)
    assert shown.zoom() == [25, 75]
    shown.page.select_option("#theme", "auto")


@pytest.mark.exhaustive
def test_patterns_can_be_switched_off(shown: Shown) -> None:
    patterned = shown.painted("memory-peaks")
    shown.page.uncheck("#patterns")
    assert until(lambda: shown.painted("memory-peaks") < patterned)


def chosen(shown: Shown) -> list[str | None]:
    """The plans A and B, by their pressed buttons."""
    rows = [shown.page.locator(f"tr:has([data-pick={letter}][aria-pressed=true])") for letter in "AB"]
    return [row.get_attribute("data-plan") for row in rows]


def mark_of(shown: Shown, plan: int) -> tuple[float, float]:
    """The point of a plan's mark on the page."""
    shown.page.locator("#plan-front").scroll_into_view_if_needed()
    place = shown.page.locator("#plan-front").bounding_box()
    point = f"(({{ seconds, bytes }}) => [seconds, bytes])(report.data.plans[{plan}])"
    x, y = shown.page.evaluate(f"() => {CHART.format('plan-front')}.convertToPixel({{ gridIndex: 0 }}, {point})")
    return place["x"] + x, place["y"] + y


@pytest.mark.exhaustive
def test_two_plans_are_chosen_in_their_rows_and_in_the_chart(shown: Shown) -> None:
    assert chosen(shown) == ["0", "5"]  # the best, and the reader's own
    shown.page.locator("[data-plan='2'] [data-pick=A]").press("Enter")
    assert chosen(shown) == ["2", "5"] and shown.page.input_value("#pair-A") == "2"
    assert shown.page.inner_text("#timeline-A-title") == "A: pp 4, 1F1B, 100 ms"
    assert shown.page.inner_text("#timeline-A-note") == "few microbatches"
    assert "is not on the page" in shown.page.inner_text("#timeline-B-note")
    shown.page.mouse.click(*mark_of(shown, 1))
    shown.page.keyboard.down("Shift")
    shown.page.mouse.click(*mark_of(shown, 3))
    shown.page.keyboard.up("Shift")
    assert chosen(shown) == ["1", "3"]
    assert shown.painted("timeline-A") > 3 and shown.painted("timeline-B") > 3
    shown.page.select_option("#pair-B", "-1")
    assert shown.page.inner_text("#pair-equal") == "Choose a plan B." and not shown.page.locator("#pair-tables").is_visible()


@pytest.mark.exhaustive
def test_two_plans_are_compared_by_part(shown: Shown) -> None:
    rows = [row.inner_text().split("\t") for row in shown.page.locator("#pair-numbers tbody tr").all()]
    found = {name: each for name, *each in rows}
    assert found["step"][:3] == ["81 ms", "120 ms", "+39 ms"] and found["bubble"][2] == "\u221225.5 ms"
    assert found["activations"][:3] == ["190.0 MiB", "200.0 MiB", "+10.0 MiB"] and found["weights"][2] == "equal"
    choices = [row.inner_text().split("\t") for row in shown.page.locator("#pair-choices tbody tr").all()]
    assert choices[:2] == [["mesh", "pp 2", "pp 8"], ["schedule", "ZBVZeroBubble", "GPipe"]]
    assert shown.page.inner_text("#pair-equal") == "Equal in both: dtype float32."


@pytest.mark.exhaustive
def test_the_table_of_plans_is_ordered_and_filtered(shown: Shown) -> None:
    def rows() -> list[str | None]:
        return [row.get_attribute("data-plan") for row in shown.page.locator("#plan-table tbody tr").all() if row.is_visible()]

    head = shown.page.locator("#plan-table th:has([data-sort=memory])")
    head.locator("button").press("Enter")
    assert rows() == ["2", "1", "3", "0", "5", "4"] and head.get_attribute("aria-sort") == "ascending"
    head.locator("button").click()
    assert rows() == ["4", "5", "0", "3", "1", "2"] and head.get_attribute("aria-sort") == "descending"
    assert shown.page.locator("[aria-sort]").count() == 1
    colours = shown.painted("plan-front")
    shown.page.select_option("[data-filter=pp]", label="2")
    assert rows() == ["4", "0", "1"] and shown.page.inner_text("#plan-count") == "3 of 6 plans: pp 2"
    assert until(lambda: shown.painted("plan-front") < colours)
    shown.page.check("#plan-fits")
    assert rows() == ["0", "1"] and shown.page.inner_text("#plan-count") == "2 of 6 plans: pp 2, within the cap"
    shown.page.click("#plan-filters [type=reset]")
    assert until(lambda: len(rows()) == 6) and shown.page.inner_text("#plan-count") == "6 plans"
    shown.page.select_option("#plan-colour", "schedule")
    legend = shown.page.evaluate(f"() => {CHART.format('plan-front')}.getOption().series.map(({{ name }}) => name)")
    assert legend[1:] == ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("width", "paper"), [(1280, False), (1920, False), (1280, True)])
def test_nothing_is_wider_than_the_window_or_the_paper(shown: Shown, width: int, paper: bool) -> None:
    shown.page.set_viewport_size({"width": width, "height": 900})
    if paper:
        shown.page.emulate_media(media="print")
        shown.page.set_viewport_size({"width": 718, "height": 1000})  # A4 with margins of a centimetre
    ends = "[...document.querySelectorAll('main *')].map(each => each.getBoundingClientRect().right)"
    assert until(lambda: shown.page.evaluate(f"() => Math.max(...{ends}) <= innerWidth"))
    axis = f"{CHART.format('timeline-0')}.getOption().xAxis[0].max"
    assert shown.page.evaluate(f"() => {axis} >= report.data.timelines[0].makespan")  # the whole step
    shown.page.emulate_media(media="screen")
    shown.page.set_viewport_size({"width": 1280, "height": 900})


@pytest.mark.exhaustive
def test_the_memory_of_a_moment_adds_up(shown: Shown) -> None:
    shown.page.hover("#memory-time", position={"x": 420, "y": 160})
    tip = shown.page.locator("#memory-time > div").last
    tip.wait_for()
    lines = tip.inner_text().split("\n")
    sizes = {line.split()[0]: float(line.split()[1]) for line in lines if "MiB" in line}
    assert list(sizes) == ["weights", "gradients", "optimizer", "buffers", "activations", "together"]
    assert sizes.pop("together") == pytest.approx(sum(sizes.values()), abs=0.3)


@pytest.mark.exhaustive
def test_texts_of_users_run_nothing(context: Any, tmp_path: Path) -> None:
    page = full_page(word=NASTY)
    shown = Shown(context, write_page(page, tmp_path / "page.html"))
    assert shown.page.title() == page.title
    assert shown.page.locator("img").count() == 0
    assert NASTY in shown.page.locator("h1").inner_text()
    shown.page.hover("#plan-front", position={"x": 600, "y": 200})
    assert shown.errors == []
    shown.page.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize(("ranks", "microbatches"), [(24, 192), (64, 512)])
def test_a_large_step_is_small_and_soon_painted(
    ranks: int, microbatches: int, context: Any, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    step = big_timeline(ranks, microbatches)
    page = Page(timelines=(TimelineView.of(step),), memory=memory(step, [700 * MIB] * ranks))
    path = write_page(page, tmp_path / "page.html")
    size = path.stat().st_size
    assert size < 1_300_000 + 10 * 3 * ranks * microbatches  # scripts, and 10 bytes for each computation
    shown = Shown(context, path)
    painted = int(shown.page.get_attribute("html", "data-painted"))
    record_property(f"first paint of {ranks} ranks x {microbatches} microbatches, ms", painted)
    with capsys.disabled():
        print(f"\n{ranks} ranks x {microbatches} microbatches: {size:,} bytes, the first chart is painted after {painted} ms")
    assert shown.painted("timeline-0") > 20
    for _ in range(6):
        shown.page.click("[data-zoom=in]")
    shown.page.fill("#microbatch", "100")
    shown.page.press("#microbatch", "Enter")
    assert f"microbatch 100 has {3 * ranks} actions on {ranks} ranks" in shown.page.inner_text("#selection")
    assert shown.errors == []
    shown.page.close()
