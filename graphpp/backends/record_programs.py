"""Wrap the stage programs of a rank in `ReplayedProgram`s, which are replayed as CUDA graphs where possible.

Contract: references to one program become references to one wrapper. A program that cannot be recorded is wrapped too, so that
`states` lists it. The log names all such programs, once per pipeline.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import torch

from graphpp.backends.cuda_graphs import CudaGraphRecorder, ReplayedProgram, program_name
from graphpp.passes.graph.cuda_graph_obstacles import COMPUTES_NOTHING, cuda_graph_obstacle
from graphpp.passes.provenance import ProgramGraphs
from graphpp.runtime.program import PipelineProgram, Program, StageProgram, WovenProgram

_LOG = logging.getLogger("graphpp")

_NOWHERE = "only CUDA devices have such graphs"

Runnable = tuple[list[PipelineProgram], list[WovenProgram]]


def recorder_for(device: torch.device) -> CudaGraphRecorder | None:
    return CudaGraphRecorder(device) if device.type == "cuda" else None


class RecordedPrograms:
    """The recordings of one pipeline on this rank. With `recorder=None` all programs run without a graph."""

    def __init__(self, recorder: CudaGraphRecorder | None) -> None:
        self._recorder = recorder
        self._told = False
        self._runs: list[tuple[str, Callable[[], str]]] = []  # a program's name, and a function that returns its state

    @property
    def states(self) -> dict[str, str]:
        """The state of each program of the last runner, by stage and phase; one entry per microbatch shape."""
        seen: Counter[str] = Counter()
        states: dict[str, str] = {}
        for name, state in self._runs:
            seen[name] += 1
            states[name + (f", graph {seen[name]}" if seen[name] > 1 else "")] = state()
        return states

    def record_all(
        self, programs: Sequence[PipelineProgram], woven: Sequence[WovenProgram], local: Collection[int], sources: ProgramGraphs
    ) -> Runnable:
        """Wrap the programs of stages `local` (this rank's)."""
        stages = {id(stage): stage for each in programs for stage in each.stages if stage.index in local}
        items = {id(item): item for stage in stages.values() for item in stage.programs.values()}
        if self._recorder is None:
            self._runs = [(program_name(item), lambda: f"not replayed: {_NOWHERE}") for item in items.values()]
            self._tell([f"all programs: {_NOWHERE}"])
            return list(programs), list(woven)
        runs = {key: self._replayed(item, self._recorder, sources) for key, item in items.items()}
        self._runs = [(run.name, run.describe) for run in runs.values()]
        self._tell([f"{run.name}: {run.reason}" for run in runs.values() if run.reason not in (None, COMPUTES_NOTHING)])
        new = {key: replace(item, run=runs[key]) for key, item in items.items()}
        replaced = {key: _stage(stage, new) for key, stage in stages.items()}
        each = [replace(one, stages=tuple(replaced.get(id(stage), stage) for stage in one.stages)) for one in programs]
        return each, [replace(one, parts=tuple(new.get(id(part), part) for part in one.parts)) for one in woven]

    def _replayed(self, item: Program, recorder: CudaGraphRecorder, sources: ProgramGraphs) -> ReplayedProgram:
        return ReplayedProgram(item, recorder, cuda_graph_obstacle(sources.of(item).graph, recorder.device.type))

    def _tell(self, reasons: list[str]) -> None:
        if reasons and not self._told:
            _LOG.warning("backend: cudagraphs=True, but these run without a graph: %s", "; ".join(reasons))
        self._told = self._told or bool(reasons)


def _stage(stage: StageProgram, new: dict[int, Program]) -> StageProgram:
    return replace(stage, programs={phase: new[id(item)] for phase, item in stage.programs.items()})

