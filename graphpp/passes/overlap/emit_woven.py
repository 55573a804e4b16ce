"""TODO contract."""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.passes.overlap.weave import WovenGraph
from graphpp.passes.text.render import render
from graphpp.runtime.program import (
    Program,
    WovenProgram,
)


def emit_woven(woven: WovenGraph, parts: Sequence[Program]) -> WovenProgram:
    """Render and load a woven graph; `parts` are the programs that were emitted for its parts."""
    rendered = render(woven.graph, woven.title)
    return WovenProgram(tuple(parts), rendered.load(f"<graphpp {woven.title}>"), rendered.text)
