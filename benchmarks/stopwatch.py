"""Divide the time of `graphpp.compile` and of a first step into parts, by the clock.

Contract: `listen(watch)` makes graphpp start the watch when `graphpp.compile` is called, and note when the captured graphs are
there, made or found in the cache ("capture"), and when a runner gets its programs ("programs"); the benchmark may add notes.
Each part is the seconds since the note before it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import graphpp
from graphpp.compiler import assemble as assembly
from graphpp.pipeline import graph_cache


@dataclass
class Stopwatch:
    """Seconds by part, in the order of their first note."""

    parts: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def start(self) -> None:
        self.last = time.perf_counter()

    def note(self, name: str) -> None:
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.last
        self.last = now


def listen(watch: Stopwatch) -> None:
    """Start the watch at every compilation; note the end of every capture, and the moment before every runner is made."""
    compile_, capture, runner = graphpp.compile, graph_cache.capture_graphs, assembly.GraphPPRunner

    def timed_compile(*args: Any, **kwargs: Any) -> Any:
        watch.start()
        return compile_(*args, **kwargs)

    def timed_capture(*args: Any, **kwargs: Any) -> Any:
        captured = capture(*args, **kwargs)
        watch.note("capture")
        return captured

    def timed_runner(*args: Any, **kwargs: Any) -> Any:
        watch.note("programs")
        return runner(*args, **kwargs)

    graphpp.compile = timed_compile
    graph_cache.capture_graphs, assembly.GraphPPRunner = timed_capture, timed_runner  # type: ignore[assignment, misc]
