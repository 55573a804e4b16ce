"""Refuses steps in which the value that a microbatch reads from a buffer would depend on the schedule.

A frozen parameter that a forward writes in place is a buffer here.

Contract
--------
- `check_forward_order`: a stage that writes buffers runs its forwards in microbatch order, as a plain loop does.
- `check_late_reads`: microbatches of several shapes have graphs of their own. A graph that writes a buffer reads the old value
  in its forward (`passes/joint/snapshot_buffers.py`). A graph that does not write the buffer may read it in its backward, or
  once per step (`passes/stage/hoist_per_step.py`), before or after another microbatch has written it. Such a step is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from graphpp.errors import BatchError, ScheduleError
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.program import Buffer, BufferUpdate, Parameter, PipelineProgram, Program, StageProgram


def check_forward_order(table: CheckedTable, written: Sequence[tuple[StageProgram, str]]) -> None:
    """Raise `ScheduleError` where a stage that writes buffers would see the microbatches in another order than a plain loop.

    `written`: (stage, FQN) of each buffer that a forward writes.
    """
    orders = table.forward_orders() if written else {}
    for stage, fqn in written:
        order = orders.get(stage.index, [])
        if order != sorted(order):
            raise ScheduleError(
                f"stage {stage.index} writes the buffer {fqn}, and the schedule runs its forwards in the order "
                f"{order}: a plain loop would write it in microbatch order. Reorder the forwards."
            )


def check_late_reads(programs: Sequence[PipelineProgram]) -> None:
    """Raise `BatchError` where one microbatch writes a buffer that another one reads outside of its forward.

    `programs`: the stage programs of each microbatch.
    """
    written: dict[str, int] = {}
    for index, pipeline in _distinct(programs):
        roles = (role for stage in pipeline.stages for item in stage.programs.values() for role in item.outputs)
        for fqn in (role.fqn for role in roles if isinstance(role, BufferUpdate)):
            written.setdefault(fqn, index)
    for index, pipeline in _distinct(programs) if written else ():
        read = (role for item in _outside_forward(pipeline) for role in item.inputs)
        for fqn in (role.fqn for role in read if isinstance(role, Buffer | Parameter) and role.fqn in written):
            raise BatchError(
                f"microbatch {written[fqn]} writes the buffer {fqn}, and microbatch {index}, which has another shape or "
                "structure and does not write it, reads it for its gradients or once per step: whether it would see the new "
                "value depends on the schedule. Run them in steps of their own."
            )


def _distinct(programs: Sequence[PipelineProgram]) -> list[tuple[int, PipelineProgram]]:
    """(first microbatch, program) of each distinct program."""
    first: dict[int, tuple[int, PipelineProgram]] = {}
    for index, pipeline in enumerate(programs):
        first.setdefault(id(pipeline), (index, pipeline))
    return list(first.values())


def _outside_forward(pipeline: PipelineProgram) -> Iterator[Program]:
    """The programs that do not run in the forward of their microbatch."""
    for stage in pipeline.stages:
        yield from (item for phase, item in stage.programs.items() if phase.is_backward)
        if stage.hoisted is not None:
            yield stage.hoisted
