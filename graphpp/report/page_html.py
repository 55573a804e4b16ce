"""A page as one HTML file: the template, the style, the script, the chart library and the data, all inline.

Contract
    in   a `Page`
    out  the text of the file. It loads nothing: the page's own policy forbids the browser to. All texts of the page's data are
         escaped. Headings, facts and tables are there without a script; a script draws the charts
    Equal pages give equal text.
"""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from graphpp.errors import GraphPPError
from graphpp.report import tables
from graphpp.report.chart_data import chart_data
from graphpp.report.page import Page
from graphpp.units import spell_bytes, spell_time

if TYPE_CHECKING:
    from jinja2 import Environment

_ASSETS = Path(__file__).parent / "assets"
_STYLES = ("page.css",)
_PARTS = ("base", "actions", "timeline", "memory", "bars", "plans", "run", "main")
_SCRIPTS = ("echarts/echarts.min.js", *(f"{part}.js" for part in _PARTS))


def page_html(page: Page) -> str:
    """The text of the page's file."""
    data, columns = chart_data(page)
    return _environment().get_template("page.html").render(
        page=page,
        data=data,
        columns=columns,
        styles=[_asset(name) for name in _STYLES],
        theme=_asset("theme.js"),
        scripts=[_asset(name) for name in _SCRIPTS],
        licences=[_asset(f"echarts/{name}") for name in ("NOTICE", "LICENSE-zrender", "LICENSE-d3")],
        tables=tables,
        spell_bytes=spell_bytes,
        spell_time=spell_time,
    )


def write_page(page: Page, path: Path) -> Path:
    """Write the page's file, whole or not at all; returns its path. Folders that lack are made.

    Raises `GraphPPError` where the file cannot be written.
    """
    text = page_html(page)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, suffix=".tmp", delete=False) as file:
            file.write(text)
        os.chmod(file.name, 0o644)  # temporary files are their owner's alone
        try:
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
    except OSError as fault:
        reason = f"the page cannot be written to {path} ({fault.strerror})"
        raise GraphPPError(f"{reason}: give a folder that can be written") from fault
    return path


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # loaded by the first page

    return Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


@cache
def _asset(name: str) -> str:
    """A file of graphpp's own, which needs no escape: none of them has the end of a script or a style."""
    return (_ASSETS / name).read_text(encoding="utf-8")
