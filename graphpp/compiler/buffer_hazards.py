"""Microbatches of several shapes in one step: none may write a buffer that another one reads at another time.

Contract: a graph that writes a buffer reads what it needs of it in its forward (`passes/joint/snapshot_buffers.py`), and
forwards run in microbatch order. A graph that does not write it may read it in its backward, or once per step
(`passes/stage/hoist_per_step.py`): then the other's new value may be there already, or not yet. `check_late_reads` raises
`BatchError` for such a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphpp.errors import BatchError
from graphpp.runtime.program import Buffer, BufferUpdate, PipelineProgram, Program


def check_late_reads(programs: Sequence[PipelineProgram]) -> None:
    """Raise where a microbatch reads late what another one writes; `programs` are those of each microbatch."""
    written: dict[str, int] = {}
    for index, pipeline in _distinct(programs):
        roles = (role for stage in pipeline.stages for item in stage.programs.values() for role in item.outputs)
        for fqn in (role.fqn for role in roles if isinstance(role, BufferUpdate)):
            written.setdefault(fqn, index)
    for index, pipeline in _distinct(programs) if written else ():
        read = (role for item in _late(pipeline) for role in item.inputs)
        for fqn in (role.fqn for role in read if isinstance(role, Buffer) and role.fqn in written):
            raise BatchError(
                f"microbatch {written[fqn]} writes the buffer {fqn}, and microbatch {index}, which has another shape or "
                "structure and does not write it, reads it for its gradients or once per step: whether it would see the new "
                "value depends on the schedule. Run them in steps of their own."
            )


def _distinct(programs: Sequence[PipelineProgram]) -> list[tuple[int, PipelineProgram]]:
    """Each of the programs once, with its first microbatch."""
    first: dict[int, tuple[int, PipelineProgram]] = {}
    for index, pipeline in enumerate(programs):
        first.setdefault(id(pipeline), (index, pipeline))
    return list(first.values())


def _late(pipeline: PipelineProgram) -> Iterator[Program]:
    """What does not run in the place of its microbatch's forward."""
    for stage in pipeline.stages:
        yield from (item for phase, item in stage.programs.items() if phase.is_backward)
        if stage.hoisted is not None:
            yield stage.hoisted
