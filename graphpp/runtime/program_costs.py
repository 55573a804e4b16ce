"""The memory of stage programs, in bytes, as `StageCosts` and `Costs` for the checker and the simulator.

Contract: times are not known from programs alone, so F = I = W = 1, and messages take no time.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.runtime.program import Phase, PipelineProgram, total_bytes
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, MessageFlow, StageCosts


def costs_of_stage(program: PipelineProgram, index: int) -> StageCosts:
    """The bytes that one microbatch of a stage saves, keeps between I and W, and has alive at the peak of each phase.

    And those that the stage receives from its neighbours, and sends to them.
    """
    stage = program.stages[index]
    run = {phase: item for phase, item in stage.programs.items() if phase is not Phase.EVALUATE}
    return StageCosts(
        saved_bytes=stage.saved_bytes,
        kept_bytes=stage.kept_bytes if Phase.WEIGHT_GRAD in stage.programs else None,
        peak_bytes={Kind(phase.value): stage.peak_bytes(phase) for phase in run},
        received_bytes=_received_bytes(program, index),
        sent_bytes={Kind(phase.value): item.sent_bytes for phase, item in run.items() if phase is not Phase.WEIGHT_GRAD},
    )


def _received_bytes(program: PipelineProgram, index: int) -> dict[Kind, int]:
    found = dict[Kind, int]()
    if index:
        found[Kind.F] = total_bytes(program.boundaries[index - 1].forward)
    if index < len(program.stages) - 1:
        found |= dict.fromkeys((Kind.B, Kind.I), total_bytes(program.boundaries[index].backward))
    return found


def costs_of_programs(program: PipelineProgram, flow: MessageFlow = MessageFlow()) -> Costs:  # noqa: B008 - a frozen value
    """The bytes of all stages, by stage; `flow`: how long the pipeline's transport holds messages."""
    woven = any(item.has_collectives for stage in program.stages for item in stage.programs.values())
    return Costs(tuple(costs_of_stage(program, stage) for stage in range(len(program.stages))), flow=flow, woven=woven)


def costs_of_microbatches(programs: Sequence[PipelineProgram], flow: MessageFlow) -> list[Costs]:
    """The bytes of all stages for each microbatch; microbatches that share their programs share one object."""
    costs = {id(program): costs_of_programs(program, flow) for program in programs}
    return [costs[id(program)] for program in programs]
