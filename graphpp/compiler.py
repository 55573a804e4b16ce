"""From settings and one example to a compiled pipeline: capture, resolve the split, lower, plan.

Contract: `Compiler.build` is a function of the model, the settings and the example alone; every rank builds all stages and
gets the same program, and `Built.facts` says so in plain text, to be compared.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from graphpp import signature
from graphpp.capture import Captured, LossFunction, capture
from graphpp.dump import Dump
from graphpp.errors import ScheduleError
from graphpp.passes.joint import JointGraph
from graphpp.passes.lower import lower
from graphpp.plan import Plan
from graphpp.runtime import program, schedules
from graphpp.runtime.checker import check
from graphpp.runtime.communication import add_communication
from graphpp.runtime.program import PipelineProgram, StageProgram
from graphpp.runtime.runner import Device
from graphpp.runtime.schedule import Schedule
from graphpp.signature import Microbatch
from graphpp.split import Call, Split, resolve


@dataclass(frozen=True)
class Settings:
    """What the caller of `graphpp.compile` chose; `place` is the device and group that were found."""

    place: Device
    example: Microbatch | None = None
    split: Split = None
    schedule: schedules.Source = "auto"
    microbatches: int | None = None
    loss_reduction: Literal["mean", "sum"] = "mean"
    dump: Path | None = None

    def microbatches_for(self, batch: Microbatch) -> int:
        """The number given; else the schedule's own; else the largest divisor of the batch up to 4 per rank."""
        if self.microbatches is not None:
            return self.microbatches
        if isinstance(self.schedule, Schedule):
            return self.schedule.microbatches
        if self.place.ranks == 1:
            return 1
        size = signature.batch_size(batch)
        return max(count for count in range(1, 4 * self.place.ranks + 1) if size % count == 0)

    @property
    def stages(self) -> int:
        """How many stages the schedule asks for where the split leaves it open."""
        return schedules.default_stages(self.schedule, self.place.ranks)


@dataclass(frozen=True)
class Built:
    """One captured graph, cut and planned."""

    captured: Captured
    program: PipelineProgram
    plan: Plan
    facts: dict[str, list[str]]

    def local_stages(self, rank: int) -> list[StageProgram]:
        """The stages that stand on `rank`."""
        return [stage for stage in self.program.stages if self.plan.rank_of_stage[stage.index] == rank]

    @cached_property
    def first_rank_of_parameter(self) -> dict[str, int]:
        """For each parameter the lowest rank that holds it: the one that counts it."""
        found: dict[str, int] = {}
        for stage in self.program.stages:
            for fqn in stage.parameters:
                rank = self.plan.rank_of_stage[stage.index]
                found[fqn] = min(rank, found.get(fqn, rank))
        return found


class Compiler:
    """Builds pipelines for one model, loss and settings."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, settings: Settings) -> None:
        self.model, self.loss, self.settings = model, loss, settings

    def build(self, example: Microbatch, training: bool) -> Built:
        """Capture and compile for microbatches like `example`. Raises `CaptureError`, `SplitError`, `ScheduleError`."""
        settings = self.settings
        dump = Dump(settings.dump, settings.place.rank, "train" if training else "eval")
        captured = dump.timed("capture", lambda: capture(self.model, self.loss, example, settings.place.device, training=training))
        dump.joint(captured.joint)
        calls = module_calls(captured.joint)
        known = [name for name, _ in self.model.named_modules()]
        starts = resolve(settings.split, calls, None if settings.split is not None else settings.stages, known)
        compiled = lower(captured.joint, starts, dump)
        schedule = self._table(len(starts), settings.microbatches or self._nominal(len(starts)))
        plan = Plan.of(captured.joint, compiled, schedule)
        facts = _facts(captured.joint, compiled, schedule, settings, example)
        dump.plan(plan, self._with_communication(schedule, training))
        return Built(captured, compiled, plan, facts)

    def schedule(self, built: Built, microbatches: int) -> Schedule:
        """The checked table with communication for a number of microbatches; forwards only for evaluation."""
        table = self._table(len(built.program.stages), microbatches)
        training = program.Phase.FORWARD in built.program.stages[0].programs
        _check_buffer_order(table, built.program)
        return self._with_communication(table, training)

    def _nominal(self, stages: int) -> int:
        if isinstance(self.settings.schedule, Schedule):
            return self.settings.schedule.microbatches
        return max(1, 4 * self.settings.place.ranks if self.settings.place.ranks > 1 else 1)

    def _table(self, stages: int, microbatches: int) -> Schedule:
        ranks = self.settings.place.ranks
        table = schedules.build(self.settings.schedule, ranks, stages, microbatches)
        check(table, ranks=ranks, stages=stages, microbatches=microbatches)
        return table

    def _with_communication(self, table: Schedule, training: bool) -> Schedule:
        table = table if training else table.forward_only()
        if not table.has_communication:
            table = add_communication(table)
        return table


def module_calls(joint: JointGraph) -> list[Call]:
    """The module calls of the forward in order of their first operation, parents before children."""
    spans: dict[str, tuple[int, int]] = {}
    for node in joint.computed():
        position = node.meta["position"]
        for call in node.meta["calls"] if position >= 0 else ():
            first, _ = spans.get(call, (position, position))
            spans[call] = (first, position + 1)
    return [Call(fqn, first, end) for fqn, (first, end) in spans.items()]


def _check_buffer_order(table: Schedule, compiled: PipelineProgram) -> None:
    """A stage that writes buffers must see the microbatches in order, as a plain loop does."""
    for stage in compiled.stages:
        roles = [role for item in stage.programs.values() for role in item.outputs]
        written = next((role.fqn for role in roles if isinstance(role, program.BufferUpdate)), None)
        order = [
            leaf.microbatch
            for _, _, action in table.cells()
            for leaf in action.leaves
            if leaf.stage == stage.index and leaf.kind == "F"
        ]
        if written is not None and order != sorted(order):  # type: ignore[type-var]
            raise ScheduleError(
                f"stage {stage.index} writes the buffer {written}, and the schedule runs its forwards in the order "
                f"{order}: a plain loop would write it in microbatch order. Reorder the forwards."
            )


def _facts(
    joint: JointGraph, compiled: PipelineProgram, schedule: Schedule, settings: Settings, example: Microbatch
) -> dict[str, list[str]]:
    """What the ranks compare, in the order in which a difference should be named."""
    state = [*joint.parameters.values(), *joint.buffers.values()]
    texts = [item.source for stage in compiled.stages for item in stage.programs.values()]
    structure, leaves = signature.signature(example)
    return {
        "the torch version": [torch.__version__],
        "the model": [f"{meta.name} {list(meta.shape)} {meta.dtype}" for meta in state],
        "the microbatch": [structure, *map(str, leaves)],
        "the schedule": [schedule.name, *str(schedule).splitlines()],
        "microbatches": [str(settings.microbatches)],
        "loss_reduction": [settings.loss_reduction],
        "the split": [f"stage {stage.index} begins with {_begins(stage)}" for stage in compiled.stages],
        "the captured graph": [hashlib.sha256(_without_paths(text).encode()).hexdigest() for text in texts],
    }


def _begins(stage: StageProgram) -> str:
    return ", ".join(stage.modules[:3]) or "(no module)"


def _without_paths(text: str) -> str:
    """A program's text without its comments: the ranks may have the sources in other folders."""
    return "\n".join(line.partition("  #")[0] for line in text.splitlines())

