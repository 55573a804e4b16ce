"""Outline the regions of stage programs and compile each distinct region once, under a backend.

- Only programs of this rank's stages are outlined. Ranks share compiled regions through the backend's cache.
- An outlined program has its original's inputs and outputs, and the same values within the backend's tolerance.
- Equal layers of any stage, phase, microbatch or graph share one region, kept as long as a captured graph uses it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from graphpp.backends.choose_backend import RegionCompiler
from graphpp.backends.regions import Regions, SizedCall
from graphpp.compiler.compile_graph import CompiledGraph
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.stage.emit import emit_outlined
from graphpp.passes.stage.outline_regions import outline_regions
from graphpp.passes.stage.split_dropout import split_dropout
from graphpp.planner.layers import layers_of, module_calls
from graphpp.progress import working
from graphpp.runtime.program import PipelineProgram, Program, StageProgram


class RegionCache:
    """The regions of a pipeline's programs on this rank."""

    def __init__(self, compiler: RegionCompiler, rank: int) -> None:
        self._regions, self._rank = Regions(compiler), rank
        self._made: dict[int, tuple[Program, Program, tuple[RegionCall, ...]]] = {}
        self._stages: dict[int, tuple[StageProgram, StageProgram]] = {}

    def outlined(
        self, graphs: Sequence[CompiledGraph], programs: Sequence[PipelineProgram], stages: Collection[int]
    ) -> tuple[list[PipelineProgram], tuple[SizedCall, ...]]:
        """Each microbatch's programs in which `stages` call their regions, and these calls, not compiled yet.

        `graphs`, `programs`: one per microbatch. Microbatches that share a program share its outlined program.
        """
        distinct = {id(pipeline): (pipeline, graph) for graph, pipeline in zip(graphs, programs, strict=True)}
        items = [(item, graph) for pipeline, graph in distinct.values() for item in _programs(pipeline, stages)]
        layers = {id(graph): layers_of(module_calls(graph.captured.joint)) for _, graph in distinct.values()}
        for item, graph in items:
            if id(item.run) not in self._made:
                made = outline_regions(split_dropout(graph.sources.of(item)), layers[id(graph)])
                emitted = emit_outlined(item, made)
                graph.sources.add(emitted, made.phase_graph)
                self._made[id(item.run)] = (item, emitted, made.calls)
        pairs = [(call, item.values) for item, _ in items for call in self._made[id(item.run)][2]]
        calls = {(id(call), id(values)): SizedCall(call, values) for call, values in pairs}
        exchanged = {key: self._exchanged(pipeline, stages) for key, (pipeline, _) in distinct.items()}
        return [exchanged[id(pipeline)] for pipeline in programs], tuple(calls.values())

    def compile(self, calls: Sequence[SizedCall]) -> None:
        """Compile new regions, and bind them to `calls`. Ranks start at different regions to share work through the cache."""
        new = deque(sorted(self._regions.new(calls), key=lambda call: call.region.key))
        new.rotate(-self._rank * max(len(new) // 2, 1))
        with working("compiling regions", len(new)) as step:
            for call in new:
                self._regions.compile(call)
                step()
        self._regions.bind(calls)

    def keep_only(self, graphs: Iterable[CompiledGraph]) -> None:
        """Forget the programs and regions of all other graphs."""
        stages = [stage for graph in graphs for pipeline in graph.variants.values() for stage in pipeline.stages]
        items = [item for stage in stages for item in stage.programs.values()]
        runs, kept = {id(item.run) for item in items}, set(map(id, stages))
        self._made = {key: made for key, made in self._made.items() if key in runs}
        self._stages = {key: pair for key, pair in self._stages.items() if key in kept}
        self._regions.keep_only(call.region.key for _, _, calls in self._made.values() for call in calls)

    def _exchanged(self, pipeline: PipelineProgram, stages: Collection[int]) -> PipelineProgram:
        return replace(
            pipeline, stages=tuple(self._stage(stage) if stage.index in stages else stage for stage in pipeline.stages)
        )

    def _stage(self, stage: StageProgram) -> StageProgram:
        """The stage with outlined programs; one object for all microbatches that share the stage."""
        if id(stage) not in self._stages:
            programs = {phase: self._outlined(item) for phase, item in stage.programs.items()}
            self._stages[id(stage)] = (stage, replace(stage, programs=programs))
        return self._stages[id(stage)][1]

    def _outlined(self, item: Program) -> Program:
        """The outlined program, for the sizes of `item`."""
        return replace(self._made[id(item.run)][1], values=item.values)


def _programs(pipeline: PipelineProgram, stages: Collection[int]) -> list[Program]:
    return [item for index in stages for item in pipeline.stages[index].programs.values()]
