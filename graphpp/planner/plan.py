"""The plan of a pipeline: stages, ranks, schedule and offloaded values, as data and as a table.

Contract: a `Plan` has no tensors and no graphs; it can be printed, saved and compared.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from graphpp.capture import activation_checkpoints as checkpoints
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.planner.memory_plan import MemoryPlan
from graphpp.planner.shard_plan import ShardPlan
from graphpp.report.page import BoundaryView, Page, StageView
from graphpp.report.text_table import text_table
from graphpp.report.timeline_view import TimelineView
from graphpp.runtime.program import Gradient, PipelineProgram, StageProgram
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes

_SHOWN = 8  # FQNs
_WITHOUT_GRADIENT = (
    "no gradient reaches these parameters, though they require one: {}{}. An optimizer leaves them as they are. Look for "
    "detach(), no_grad() and modules that the forward does not call; where this is meant, requires_grad_(False) says so"
)


@dataclass(frozen=True)
class StagePlan:
    """One stage: its rank, its modules, and its bytes, per microbatch except `parameter_bytes`. `trained`: how many of its
    parameters get a gradient (None: an evaluation); `untrained`: FQNs of those that require a gradient and get none."""

    stage: int
    rank: int
    modules: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    sent_forward_bytes: int
    sent_backward_bytes: int
    saved_bytes: int
    trained: int | None = None
    untrained: tuple[str, ...] = ()

    @property
    def view(self) -> StageView:
        sizes = self.parameters, self.parameter_bytes, self.saved_bytes
        return StageView(self.stage, self.rank, self.modules, *sizes)

    @property
    def cells(self) -> tuple[str, ...]:
        sizes = map(spell_bytes, (self.sent_forward_bytes, self.sent_backward_bytes, self.saved_bytes))
        counts = f"{self.parameters:,}", "-" if self.trained is None else f"{self.trained:,}"
        return str(self.stage), str(self.rank), ", ".join(self.modules) or "(no module)", *counts, *sizes


@dataclass(frozen=True)
class Plan:
    """The stages, their ranks and the schedule.

    `offload_windows`: saved values kept in host memory between forward and backward. `checkpoints`: number of module calls that
    the model itself checkpoints (`torch.utils.checkpoint`). `sharding`: the cost of shards over `dp_shard`. `memory`: bytes of
    each rank in a training step; None for evaluation.
    """

    stages: tuple[StagePlan, ...]
    schedule: Schedule
    offload_windows: tuple[OffloadWindow, ...] = ()
    checkpoints: int = 0
    sharding: ShardPlan | None = None
    memory: MemoryPlan | None = None

    @classmethod
    def of(cls, joint: JointGraph, program: PipelineProgram, schedule: Schedule) -> Plan:
        """The plan of a compiled pipeline."""
        stages = tuple(_stage_plan(joint, program, stage, schedule) for stage in program.stages)
        return cls(stages, schedule, checkpoints=checkpoints.count_checkpointed_calls(joint) if joint.training else 0)

    @cached_property
    def rank_of_stage(self) -> dict[int, int]:
        """Stage -> rank within the group."""
        return {stage.stage: stage.rank for stage in self.stages}

    @property
    def without_gradient(self) -> str:
        """A sentence about the parameters that require a gradient and get none; "" if there are none."""
        names = list(dict.fromkeys(fqn for stage in self.stages for fqn in stage.untrained))
        whole = [f"stage {stage.stage}" for stage in self.stages if stage.untrained and not stage.trained]
        some = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
        trained = f"; {', '.join(whole)} {'is' if len(whole) == 1 else 'are'} not trained at all" if whole else ""
        return _WITHOUT_GRADIENT.format(", ".join(some), trained) if names else ""

    def to_html(self) -> str:
        """The plan as a self-contained HTML page: the schedule with F = I = W = 1, and the memory of ranks, stages and
        boundaries. `pipe.report` writes a page with seconds. Write the text to a file with `encoding="utf-8"`."""
        from graphpp.report.page_html import page_html  # imported on first use

        return page_html(self._page())

    def _page(self) -> Page:
        table = self.schedule
        (unit,) = timelines_of([table])
        pairs = zip(self.stages, self.stages[1:], strict=False)
        return Page(
            title=f"The plan of {table.name}",
            facts=tuple((name, str(getattr(table, name))) for name in ("stages", "ranks", "microbatches")),
            timelines=(TimelineView.of(unit, "F = I = W = 1 for each rank and microbatch: these are no seconds."),),
            memory=None if self.memory is None else self.memory.view,
            stages=tuple(each.view for each in self.stages),
            boundaries=tuple(BoundaryView(low.stage, low.sent_forward_bytes, high.sent_backward_bytes) for low, high in pairs),
        )

    def __str__(self) -> str:
        """The stages with their bytes, then the memory of each rank and the shards."""
        ranks, away = self.schedule.ranks, bool(self.offload_windows)
        place = f"{len(self.stages)} stages on {ranks} rank{'s' * (ranks > 1)}"
        heads = ["stage", "rank", "modules", "parameters", "trained", "sent →", "sent ←", "saved", *["offloaded"] * away]
        rows = [(*stage.cells, *([self._offloaded(stage.stage)] if away else [])) for stage in self.stages]
        calls = f"; the model checkpoints {self.checkpoints} call{'s' * (self.checkpoints > 1)}" if self.checkpoints else ""
        table = text_table(
            heads, rows, left=("modules",), wraps=("modules",), caption=f"bytes per microbatch{calls}",
            title=f"{place}, {self.schedule.name}, {self.schedule.microbatches} microbatches",
        )  # fmt: skip
        parts = self.without_gradient or None, self.memory, self.sharding
        return "\n".join([table, *(str(part) for part in parts if part is not None)])

    def _offloaded(self, stage: int) -> str:
        """`1.2 MiB, 5 of 8`: the most bytes that a microbatch offloads, and how many microbatches offload any."""
        away: Counter[int] = Counter()
        for window in self.offload_windows:
            if window.stage == stage:
                away[window.microbatch] += window.nbytes
        return f"{spell_bytes(max(away.values()))}, {len(away)} of {self.schedule.microbatches}" if away else "-"


def _stage_plan(joint: JointGraph, program: PipelineProgram, stage: StageProgram, schedule: Schedule) -> StagePlan:
    metas = [joint.parameters[fqn] for fqn in stage.parameters]
    trained = {role.fqn for role, _ in joint.outputs() if isinstance(role, Gradient)}
    forward = program.boundaries[stage.index].forward if stage.index < len(program.stages) - 1 else ()
    backward = program.boundaries[stage.index - 1].backward if stage.index else ()
    return StagePlan(
        stage=stage.index,
        rank=schedule.rank_of_stage[stage.index],
        modules=outermost(stage.modules),
        parameters=sum(meta.nbytes // meta.dtype.itemsize for meta in metas),
        parameter_bytes=sum(meta.nbytes for meta in metas),
        sent_forward_bytes=sum(value.nbytes for value in forward),
        sent_backward_bytes=sum(value.nbytes for value in backward),
        saved_bytes=stage.saved_bytes,
        trained=sum(meta.nbytes // meta.dtype.itemsize for meta in metas if meta.name in trained) if joint.training else None,
        untrained=tuple(meta.name for meta in metas if meta.requires_grad and joint.training and meta.name not in trained),
    )


def outermost(calls: tuple[str, ...]) -> tuple[str, ...]:
    """The calls inside no other call of the list, with runs of numbered siblings abbreviated: `layers.0 .. layers.3`."""
    named = [call for call in calls if not any(call.startswith(other + ".") for other in calls)]
    shown: list[list[str]] = []
    for call in named:
        prefix, _, number = call.rpartition(".")
        before = shown[-1][-1].rpartition(".") if shown else ("", "", "")
        following = number.isdigit() and before[0] == prefix and before[2].isdigit() and int(number) == int(before[2]) + 1
        shown[-1].append(call) if following else shown.append([call])
    return tuple(run[0] if len(run) == 1 else f"{run[0]} .. {run[-1]}" for run in shown)
