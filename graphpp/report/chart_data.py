"""The data of a page for its script: JSON that refers to packed columns.

Contract: `chart_data(page)` returns (a JSON value, the columns as text). Absent parts are None or empty, and get no chart.
Non-finite numbers are only in columns. Columns are one gzip block as base64 text, which needs no escape in HTML; the script
reads `{"type", "at", "count"}` as a typed array (little-endian; `at` in bytes, a multiple of 8). The texts and numbers by which
plans are compared are there, too, as JSON. Equal pages give equal data.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Sequence
from typing import Any

from graphpp.report.comparison import is_part
from graphpp.report.memory_view import MemoryView
from graphpp.report.page import Page, PlanEntry
from graphpp.report.run_view import Curve
from graphpp.report.timeline_view import KINDS, TimelineView

_SIZES = {"u1": 1, "u2": 2, "i4": 4, "f4": 4, "f8": 8}
_BOX = {"kind": "u1", "stage": "u2", "microbatch": "i4", "chunk": "u2", "lane": "u1", "lanes": "u1"}
_BOX |= {"start": "f4", "duration": "f4"}


def chart_data(page: Page) -> tuple[dict[str, Any], str]:
    columns = _Columns()
    by_seconds = sorted(range(len(page.plans)), key=lambda at: page.plans[at].seconds)
    data = {
        "kinds": KINDS,
        "timelines": [_timeline(each, columns) for each in page.timelines],
        "memory": None if page.memory is None else _memory(page.memory, columns),
        "stages": [{"rank": each.rank, "parameters": each.parameter_bytes, "saved": each.saved_bytes} for each in page.stages],
        "boundaries": [
            {"forward": each.forward_bytes, "backward": each.backward_bytes, "relayed": each.relayed_bytes}
            for each in page.boundaries
        ],
        "plans": [_plan(each, columns) for each in page.plans],
        "compared": columns.add_json(list(map(_compared, page.plans))),
        "front": [at for at in by_seconds if page.plans[at].on_front and page.plans[at].fits],
        "cap": page.cap,
        "losses": _curve(page.run.losses, columns),
        "seconds": _curve(page.run.seconds, columns),
    }
    return data, columns.text()


class _Columns:
    def __init__(self) -> None:
        self._block = bytearray()

    def add(self, type_: str, values: Sequence[float]) -> dict[str, str | int]:
        """Append a column and return its place. Raises `OverflowError` for integers that do not fit the type."""
        import numpy  # loaded by the first page

        data = numpy.array(values, dtype=f"<{type_}").tobytes()
        place: dict[str, str | int] = {"type": type_, "at": len(self._block), "count": len(data) // _SIZES[type_]}
        self._block += data + bytes(-len(data) % 8)
        return place

    def add_json(self, value: object) -> dict[str, str | int]:
        return self.add("u1", list(json.dumps(value, ensure_ascii=False).encode()))

    def text(self) -> str:
        return base64.b64encode(gzip.compress(self._block, compresslevel=6, mtime=0)).decode("ascii")


def _plan(plan: PlanEntry, columns: _Columns) -> dict[str, Any]:
    return {
        **{name: getattr(plan, name) for name in ("name", "seconds", "reason", "fits", "yours")},
        "bytes": plan.nbytes,
        "values": {each.name: each.value for each in (*plan.choices, *plan.results)},
        "timeline": None if plan.timeline is None else _timeline(plan.timeline, columns),
    }


def _compared(plan: PlanEntry) -> dict[str, Any]:
    """`parts`: the parts of the seconds and of the bytes, in order."""
    parts = {
        unit: {name: each for name, of, each in plan.numbers if of == unit and is_part(name)} for unit in ("seconds", "bytes")
    }
    return {"texts": {**plan.texts, "reason": plan.reason or "best"}, "numbers": plan.numbers, "parts": parts}


def _timeline(view: TimelineView, columns: _Columns) -> dict[str, Any]:
    """`rows`: the index of each rank's first box, then the number of boxes."""
    rows, at = [0] * (len(view.ranks) + 1), 0
    for rank in range(len(view.ranks)):
        while at < len(view.boxes) and view.boxes[at].rank == rank:
            at += 1
        rows[rank + 1] = at
    return {
        **{name: getattr(view, name) for name in ("name", "schedule", "unit", "makespan", "microbatches", "note", "whole")},
        "chunks": max(len(each.stages) for each in view.ranks),
        "rows": rows,
        "busy": columns.add("f8", [each.busy for each in view.ranks]),
        "columns": {name: columns.add(type_, [getattr(box, name) for box in view.boxes]) for name, type_ in _BOX.items()},
    }


def _memory(view: MemoryView, columns: _Columns) -> dict[str, Any]:
    return {
        "kinds": view.kinds,
        "unit": view.unit,
        "peaks": [each.peak for each in view.ranks],
        "caps": [each.cap for each in view.ranks],
        "times": [columns.add("f4", each.times) for each in view.ranks],
        "curves": [[columns.add("f8", curve) for curve in each.curves] for each in view.ranks],
    }


def _curve(curve: Curve, columns: _Columns) -> dict[str, Any]:
    return {"every": curve.every, "values": columns.add("f8", curve.values)}
