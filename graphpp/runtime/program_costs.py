"""The bytes of stage programs as `StageCosts` and `Costs`, with F = I = W = 1 for their times."""

from __future__ import annotations

from graphpp.runtime.program import Phase, PipelineProgram, StageProgram
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts


def costs_of_stage(stage: StageProgram) -> StageCosts:
    """The bytes that one microbatch of a stage saves, keeps between I and W, and has alive at its peak, by kind."""
    run = {phase: item for phase, item in stage.programs.items() if phase is not Phase.EVALUATE}
    kinds = {Kind(phase.value): item.peak_bytes for phase, item in run.items()}
    kept = stage.kept_bytes if Phase.WEIGHT_GRAD in stage.programs else None
    return StageCosts(saved_bytes=stage.saved_bytes, kept_bytes=kept, peak_bytes=kinds)


def costs_of_programs(program: PipelineProgram) -> Costs:
    """The bytes of all stages, by stage; messages take no time."""
    return Costs(tuple(map(costs_of_stage, program.stages)))
