"""Emit a woven graph: render it as Python, load it, and pair it with the programs of its parts.

Contract: `WovenProgram.run(boxed)` takes the arguments of all parts, one part after the other, and returns their results in
the same order, bit-equal to running the parts one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.passes.overlap.weave import WovenGraph
from graphpp.passes.text.render import render
from graphpp.runtime.program import Program, WovenProgram


def emit_woven(woven: WovenGraph, parts: Sequence[Program]) -> WovenProgram:
    """Render and load a woven graph; `parts` are the programs that were emitted for its parts, in the same order."""
    rendered = render(woven.graph, woven.title)
    return WovenProgram(tuple(parts), rendered.load(f"<graphpp {woven.title}>"), rendered.text)
