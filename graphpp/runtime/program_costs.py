"""The memory of stage programs, in bytes, as `StageCosts` and `Costs` for the checker and the simulator.

Contract: times are not known from programs alone, so F = I = W = 1, and messages take no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.runtime.program import Phase, PipelineProgram, StageProgram
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts


def costs_of_stage(stage: StageProgram) -> StageCosts:
    """The bytes that one microbatch of a stage saves, keeps between I and W, and has alive at the peak of each phase."""
    run = {phase: item for phase, item in stage.programs.items() if phase is not Phase.EVALUATE}
    kinds = {Kind(phase.value): item.peak_bytes for phase, item in run.items()}
    kept = stage.kept_bytes if Phase.WEIGHT_GRAD in stage.programs else None
    return StageCosts(saved_bytes=stage.saved_bytes, kept_bytes=kept, peak_bytes=kinds)


def costs_of_programs(program: PipelineProgram) -> Costs:
    """The bytes of all stages, by stage."""
    return Costs(tuple(map(costs_of_stage, program.stages)))


def costs_of_microbatches(programs: Sequence[PipelineProgram]) -> list[Costs]:
    """The bytes of all stages for each microbatch; microbatches that share their programs share one object."""
    costs = {id(program): costs_of_programs(program) for program in programs}
    return [costs[id(program)] for program in programs]
