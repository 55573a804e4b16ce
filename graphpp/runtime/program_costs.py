"""The memory of stage programs, in bytes, as `StageCosts` and `Costs` in which F = I = W = 1 and messages take no time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from graphpp.runtime.messages.wire_layout import ReceiveBuffer
from graphpp.runtime.program import Phase, PipelineProgram, TensorMeta, total_bytes
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, MessageFlow, StageCosts


def costs_of_stage(program: PipelineProgram, index: int) -> StageCosts:
    """The bytes of one microbatch of a stage: saved, kept from I to W, at each phase's peak, received and sent."""
    stage = program.stages[index]
    run = {phase: item for phase, item in stage.programs.items() if phase not in (Phase.EVALUATE, Phase.RECOMPUTE)}
    peaks = {Kind(phase.value): stage.peak_bytes(phase) for phase in run}
    found = StageCosts(
        saved_bytes=stage.saved_bytes,
        kept_bytes=stage.kept_bytes if Phase.WEIGHT_GRAD in stage.programs else None,
        peak_bytes=peaks,
        received_bytes=_received_bytes(program, index),
        sent_bytes={Kind(phase.value): item.sent_bytes for phase, item in run.items() if phase is not Phase.WEIGHT_GRAD},
    )
    if Phase.RECOMPUTE not in stage.programs:
        return found
    recomputed = total_bytes(stage.recomputed_memory)
    peaks_ahead = {**peaks, Kind.F: stage.peak_bytes(Phase.RECOMPUTE)}
    return replace(found, ahead=StageCosts(saved_bytes=recomputed, kept_bytes=found.kept_bytes, peak_bytes=peaks_ahead))


def _received_bytes(program: PipelineProgram, index: int) -> dict[Kind, int]:
    found = dict[Kind, int]()
    if index:
        found[Kind.F] = _buffers(program.boundaries[index - 1].forward)
    if index < len(program.stages) - 1:
        found |= dict.fromkeys((Kind.B, Kind.I), _buffers(program.boundaries[index].backward))
    return found


def _buffers(values: Iterable[TensorMeta]) -> int:
    """The bytes of the receive buffers of several values."""
    return sum(map(ReceiveBuffer.nbytes, values))


def costs_of_programs(program: PipelineProgram, flow: MessageFlow = MessageFlow()) -> Costs:  # noqa: B008 - a frozen value
    """The bytes of all stages; `flow`: how long the pipeline's transport keeps messages."""
    woven = any(item.has_collectives for stage in program.stages for item in stage.programs.values())
    return Costs(tuple(costs_of_stage(program, stage) for stage in range(len(program.stages))), flow=flow, woven=woven)


def costs_of_microbatches(programs: Sequence[PipelineProgram], flow: MessageFlow) -> list[Costs]:
    """The costs of each microbatch; microbatches with the same programs share one object."""
    costs = {id(program): costs_of_programs(program, flow) for program in programs}
    return [costs[id(program)] for program in programs]
