"""Stage programs under a backend: their regions outlined, compiled once each, and called.

Contract
--------
- Only what this rank runs is compiled, when a runner is made; ranks share what they compile through the backend's cache.
- A compiled program has the roles of the one it was made from, and computes the same within the backend's tolerance.
- Equal layers, of whatever stage, phase, microbatch or captured graph, share one compiled region.
- What was compiled lives as long as a captured graph that it is for.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from graphpp.backends.compilers import RegionCompiler
from graphpp.backends.regions import Regions
from graphpp.compiler.build import Built
from graphpp.options.split import ModuleCall
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.stage.emit import emit_outlined
from graphpp.passes.stage.outline_regions import LayerOf, OutlinedGraph, outline_regions
from graphpp.passes.stage.split_dropout import split_dropout
from graphpp.planner.layers import module_calls, repeated_layers
from graphpp.runtime.program import PipelineProgram, Program, StageProgram


class CompiledPrograms:
    """The programs of a pipeline that have been compiled so far."""

    def __init__(self, compiler: RegionCompiler, rank: int) -> None:
        self._regions, self._rank = Regions(compiler), rank
        self._made: dict[int, tuple[Program, Program, tuple[RegionCall, ...]]] = {}
        self._stages: dict[int, tuple[StageProgram, StageProgram]] = {}

    def compile(self, given: Sequence[tuple[Built, PipelineProgram]], stages: Sequence[int]) -> list[PipelineProgram]:
        """The pipelines of a step's microbatches with these stages compiled."""
        new = {id(item): (item, built) for built, pipeline in given for item in _programs(pipeline, stages)}
        outlined = {key: _outlined(item, built) for key, (item, built) in new.items() if key not in self._made}
        self._compile_regions([call for made in outlined.values() for call in made.calls])
        for key, made in outlined.items():
            item, built = new[key]
            emitted = emit_outlined(item, made)
            built.sources.add(emitted, made.slot)
            self._made[key] = (item, emitted, made.calls)
        return [self._exchanged(pipeline, stages) for _, pipeline in given]

    def keep_only(self, graphs: Iterable[Built]) -> None:
        """Forget what was compiled for other graphs than these."""
        stages = [stage for built in graphs for pipeline in built.finished.values() for stage in pipeline.stages]
        items = [item for stage in stages for item in stage.programs.values()]
        kept = set(map(id, [*stages, *items]))
        self._made = {key: made for key, made in self._made.items() if key in kept}
        self._stages = {key: pair for key, pair in self._stages.items() if key in kept}
        self._regions.keep_only(call.region.key for _, _, calls in self._made.values() for call in calls)

    def _compile_regions(self, calls: Sequence[RegionCall]) -> None:
        """Compile what is new; each rank begins with another one, so that ranks with one cache share the work."""
        from rich.console import Console  # loaded by the first compilation
        from rich.progress import track

        new = deque(sorted(self._regions.new(calls), key=lambda region: region.key))
        new.rotate(-self._rank * max(len(new) // 2, 1))
        quiet = not sys.stderr.isatty()
        for region in track(new, "compiling regions", console=Console(stderr=True), transient=True, disable=quiet):
            self._regions.compile(region)
        self._regions.bind(calls)

    def _exchanged(self, pipeline: PipelineProgram, stages: Sequence[int]) -> PipelineProgram:
        return replace(
            pipeline, stages=tuple(self._stage(stage) if stage.index in stages else stage for stage in pipeline.stages)
        )

    def _stage(self, stage: StageProgram) -> StageProgram:
        """The stage with its compiled programs; the same object for microbatches that share theirs."""
        if id(stage) not in self._stages:
            programs = {phase: self._made[id(item)][1] for phase, item in stage.programs.items()}
            self._stages[id(stage)] = (stage, replace(stage, programs=programs))
        return self._stages[id(stage)][1]


def _outlined(item: Program, built: Built) -> OutlinedGraph:
    return outline_regions(split_dropout(built.sources.of(item)), layers_of(module_calls(built.captured.joint)))


def layers_of(calls: Sequence[ModuleCall]) -> LayerOf:
    """Which of the model's repeated layers an operation belongs to: "" for none, None where only its reader knows."""
    layers = {call.fqn for call in repeated_layers(calls)}

    def layer(node: fx.Node) -> str | None:
        inside: Sequence[str] = node.meta.get("calls") or ()
        return next((call for call in inside if call in layers), "") if inside else None

    return layer


def _programs(pipeline: PipelineProgram, stages: Sequence[int]) -> list[Program]:
    return [item for index in stages for item in pipeline.stages[index].programs.values()]
