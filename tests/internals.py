"""The private things of a pipeline that tests and benchmarks look at or replace: every access stands here.

All else goes through the public face: `pipe.plan`, `pipe.programs(stage)`, `pipe.named_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import graphpp
from graphpp.backends.record_programs import StepGraphs
from graphpp.compiler import assemble, capture_once, compile_graph
from graphpp.compiler.assemble import Assembly
from graphpp.compiler.build import Lowered
from graphpp.pipeline import graph_cache
from graphpp.runtime.program import WovenProgram
from graphpp.runtime.runner import GraphPPRunner


def last_lowered(pipe: graphpp.Pipeline) -> Lowered:
    """All that was decided about the last call."""
    assert pipe._calls.last is not None
    return pipe._calls.last.lowered


def last_runner(pipe: graphpp.Pipeline) -> GraphPPRunner:
    """The runner of the last call."""
    assert pipe._calls.last is not None
    return pipe._calls.last.runner


def woven_programs(pipe: graphpp.Pipeline) -> list[WovenProgram]:
    """The woven programs of this rank in the last call."""
    return list(last_lowered(pipe).woven)


def kept(pipe: graphpp.Pipeline) -> tuple[int, int]:
    """How many graphs and how many runners a pipeline keeps."""
    return len(pipe._cache._graphs), len(pipe._cache._prepared)


def signatures(pipe: graphpp.Pipeline) -> list[tuple[str, ...]]:
    """The signatures of the graphs that a pipeline keeps, the one used longest ago first."""
    return [key.signature for key in pipe._cache._graphs]


def failing_in(phase: str | None) -> AbstractContextManager[Any]:
    """Meanwhile preparing a new call raises `ValueError` while it is "lowered" or "compiled"; None: nothing fails."""

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError(f"{phase} fails")

    if phase is None:
        return nullcontext()
    return patch.object(graph_cache, "lowered", fail) if phase == "lowered" else patch.object(Assembly, "compile", fail)


capture = capture_once.capture
"""The capture that pipelines run, unless it is replaced."""


def capturing_by(replacement: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Pipelines compiled meanwhile capture by `replacement(model, loss, microbatch, device, training=)`."""
    return patch.object(capture_once, "capture", replacement)


@contextmanager
def captures() -> Iterator[list[Any]]:
    """The graphs that pipelines compiled meanwhile capture, as they are made."""
    made: list[Any] = []
    run = capture_once.capture

    def noting(*args: Any, **options: Any) -> Any:
        made.append(run(*args, **options))
        return made[-1]

    with capturing_by(noting):
        yield made


def offloading_by(mover: Any) -> AbstractContextManager[Any]:
    """Runners made meanwhile move offloaded values by `mover`."""
    return patch.object(assemble, "mover_for", lambda device: mover)


def freeing_memory() -> AbstractContextManager[Any]:
    """Meanwhile offloaded values count as away, as on a device whose memory is not the host's."""
    return patch.object(compile_graph, "eviction_frees_memory", lambda device: True)


def recording_by(recorder: Any) -> AbstractContextManager[Any]:
    """Pipelines compiled meanwhile record CUDA graphs by `recorder`; None: the device has no such graphs."""
    return patch.object(assemble, "recorder_for", lambda device: recorder)


def recording_tasks() -> AbstractContextManager[Any]:
    """Meanwhile a step is recorded as one CUDA graph for each task, never as one graph."""
    return patch.object(StepGraphs, "_run_whole", lambda graphs, step: False)
