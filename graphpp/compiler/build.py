"""From settings and one example to a compiled pipeline: capture, resolve the split, lower, plan.

Contract: `Compiler.build` is a function of the model, the settings, the example and the number of microbatches alone;
every rank builds all stages and gets the same program, and `Built.facts` says so in plain text, to be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import torch
from torch import nn

from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture import activation_checkpoints as checkpoints
from graphpp.capture.outputs import check_output_leaves
from graphpp.capture.trace import CapturedGraph, LossFunction, capture
from graphpp.compiler import facts, overlap
from graphpp.compiler.dump import Dump
from graphpp.errors import BatchError, ScheduleError
from graphpp.options.options import Options
from graphpp.options.recompute import Recompute
from graphpp.options.split import ModuleCall
from graphpp.parallel.agreement import Facts
from graphpp.parallel.place import RankPlace
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.passes.lower import Hook, LoweringOptions, PassResult, lower, lower_assigned
from graphpp.passes.provenance import ProgramGraphs
from graphpp.passes.stage.outline_regions import cost_with_regions
from graphpp.planner import offload_policy as offload
from graphpp.planner import recompute_policy as policy
from graphpp.planner.counts import stages_of
from graphpp.planner.layers import module_calls
from graphpp.planner.plan import Plan
from graphpp.planner.resolve_split import resolve
from graphpp.runtime import program
from graphpp.runtime.offloader import eviction_frees_memory
from graphpp.runtime.program import PipelineProgram, StageProgram, WovenProgram
from graphpp.runtime.program_costs import costs_of_programs
from graphpp.runtime.runner import ranks_of_parameters
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule


@dataclass(frozen=True)
class Wanted:
    """What a schedule asks of a stage's programs: I and W beside B; values computed again, not saved."""

    split_backward: bool
    recomputed: bool


@dataclass(frozen=True)
class Built:
    """One captured graph, cut and planned. `finished` has its programs by what a schedule asks of them."""

    captured: CapturedGraph
    program: PipelineProgram
    plan: Plan
    finished: dict[Wanted, PipelineProgram] = field(default_factory=dict)
    sources: ProgramGraphs = field(default_factory=ProgramGraphs)
    dump: Dump | None = None

    @property
    def facts(self) -> Facts:
        """What the ranks compare."""
        return facts.of_built(self.captured.joint, self.program, self.plan.schedule)

    def local_stages(self, rank: int) -> list[StageProgram]:
        """The stages that stand on `rank`."""
        return [stage for stage in self.program.stages if self.plan.rank_of_stage[stage.index] == rank]

    def parameters(self, rank: int) -> set[str]:
        """FQNs of the parameters that `rank` holds."""
        return {fqn for stage in self.local_stages(rank) for fqn in stage.parameters}

    def buffers(self, rank: int) -> set[str]:
        """FQNs of the buffers that `rank` holds."""
        return {fqn for stage in self.local_stages(rank) for fqn in stage.buffers}

    @cached_property
    def ranks_of_parameter(self) -> dict[str, list[int]]:
        """For each parameter the ranks that hold it, ascending; the first one counts it."""
        return ranks_of_parameters(self.program, self.plan.rank_of_stage)

    def written_buffers(self) -> Iterator[tuple[StageProgram, str]]:
        """(stage, FQN) of each buffer that a forward writes."""
        for stage in self.program.stages:
            for role in (role for item in stage.programs.values() for role in item.outputs):
                if isinstance(role, program.BufferUpdate):
                    yield stage, role.fqn


class Compiler:
    """Builds pipelines for one model, loss and settings."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        options: Options,
        place: RankPlace,
        watch: Hook = lambda passed: None,
    ) -> None:
        """`watch` sees the captured graph (as pass "capture") and the result of each pass, after the dump."""
        self.model, self.loss, self.options, self.place, self._watch = model, loss, options, place, watch
        self._begins: list[list[str]] = []  # per stage after the first, what was called from its start on, in order

    def build(self, example: FlatMicrobatch, microbatches: int, *, training: bool) -> Built:
        """Capture and compile for microbatches like `example`. Raises `CaptureError`, `SplitError`, `ScheduleError`."""
        dump = Dump(self.options.debug.dump, self.place.rank, "train" if training else "eval")
        captured = dump.capture(lambda: self._capture(example, training))
        self._watch(PassResult("capture", 0.0, captured.joint))
        starts = self._starts(module_calls(captured.joint))
        schedule = self._table(len(starts), microbatches, training=training)
        usual = Wanted(_splits_backward(schedule), bool(self._recomputed(schedule)))
        sources = ProgramGraphs()
        hook = _both(dump.hook(schedule), _both(sources.hook(), self._watch))
        compiled = lower(captured.joint, starts, hook, self._choices(captured.joint, usual))
        plan = Plan.of(captured.joint, compiled, schedule)
        built = Built(captured, compiled, plan, {usual: compiled}, sources, dump)
        if training and self.options.memory.offload is not None:
            built = replace(built, plan=replace(plan, offload_windows=self.offload_windows([built] * microbatches, schedule)))
        dump.plan(built.plan, _with_communication(schedule, training))
        return built

    def schedule(self, each: Sequence[Built], *, training: bool) -> Schedule:
        """The checked table with communication for microbatches of these graphs; forwards only for evaluation."""
        table = self._table(len(each[0].program.stages), len(each), training=training)
        for built in {id(built): built for built in each}.values():
            _check_places(table, built)
            _check_buffer_order(table, built)
        if self.options.memory.cap is not None and training:
            programs = [self.program(built, table, index) for index, built in enumerate(each)]
            self._check(table, [costs_of_programs(program) for program in programs], self.offload_windows(each, table))
        return _with_communication(table, training)

    def program(self, built: Built, schedule: Schedule, microbatch: int) -> PipelineProgram:
        """The programs for one microbatch of a schedule: each stage's with or without what is recomputed."""
        again = {stage for stage, index in self._recomputed(schedule) if index == microbatch}
        split = _splits_backward(schedule)
        kinds = {flag: self._finished(built, Wanted(split, flag)) for flag in {s in again for s in range(schedule.stages)}}
        some = next(iter(kinds.values()))
        assert all(kind.boundaries == some.boundaries for kind in kinds.values()), "recomputation changed what travels"
        return replace(some, stages=tuple(kinds[stage.index in again].stages[stage.index] for stage in some.stages))

    def offload_windows(self, built: Sequence[Built], schedule: Schedule) -> tuple[OffloadWindow, ...]:
        """The saved values of all ranks that leave their device for a while; `built` are the graphs of each microbatch."""
        if self.options.memory.offload is None:
            return ()
        sources = ProgramGraphs.joined(each.sources for each in built)
        programs = [self.program(each, schedule, index) for index, each in enumerate(built)]
        option = self.options.memory.offload
        return offload.offload_windows(option, schedule, programs, lambda item: sources.of(item).graph)

    def overlaps(
        self, built: Sequence[Built], programs: Sequence[PipelineProgram], schedule: Schedule
    ) -> tuple[list[WovenProgram], dict[str, list[str]]]:
        """The woven programs of this rank's row, and by process group the collectives of a step, in order.

        `built` and `programs` are those of each microbatch.
        """
        place = self.place
        row = overlap.Row(schedule.table[place.rank], programs, ProgramGraphs.joined(each.sources for each in built))
        dump = built[0].dump
        cost = self.options.parallel.op_costs or OpCosts.of(place.device.type)
        made = overlap.woven(row, cost_with_regions(cost), dump.woven if dump is not None else lambda *_: None)
        return [emitted for _, emitted in made.values()], overlap.collectives_of(row, made)

    def _finished(self, built: Built, wanted: Wanted) -> PipelineProgram:
        if not built.captured.joint.training:  # forwards alone: nothing to split, nothing to recompute
            return built.program
        if wanted not in built.finished:
            joint, stages = built.captured.joint, len(built.program.stages)
            built.finished[wanted] = lower_assigned(joint, stages, built.sources.hook(), self._choices(joint, wanted))
        return built.finished[wanted]

    def _choices(self, joint: JointGraph, wanted: Wanted) -> LoweringOptions:
        option = self.options.memory.recompute or Recompute()
        region = policy.region_of(option, module_calls(joint)) if wanted.recomputed and joint.training else None
        savings = policy.recompute_budget(option, region, self.place.device.type, self.options.parallel.op_costs)
        whole = region if option.fraction is None else None  # a budget chooses single values, not whole layers
        whole, chosen = checkpoints.add_checkpoint_regions(joint, whole, policy.may_recompute(option))
        rerun, options = policy.may_repeat_in_weight_grad(option), self.options
        return LoweringOptions(wanted.split_backward, rerun, whole, chosen, savings, options.fused, options.hoists)

    def _recomputed(self, schedule: Schedule) -> frozenset[tuple[int, int]]:
        """The (stage, microbatch) that recompute: those the schedule names, else all or none."""
        if schedule.recomputed is not None or self.options.memory.recompute is None:
            return schedule.recomputed or frozenset()
        return frozenset(product(range(schedule.stages), range(schedule.microbatches)))

    def _starts(self, calls: list[ModuleCall]) -> tuple[int, ...]:
        """Where the stages start; in a later graph before the same calls as in the first.

        A call may have no operation there (dropout in evaluation): then before the next one that has.
        """
        if self._begins:
            positions = {call.fqn: call.position for call in calls}
            end = max((call.end for call in calls), default=0)
            later = ((positions[fqn] for fqn in names if fqn in positions) for names in self._begins)
            return (0, *(next(found, end) for found in later))
        stages = None if self.options.split is not None else stages_of(self.options, self.place.ranks)
        known = [name for name, _ in self.model.named_modules()]
        starts = resolve(self.options.split, calls, stages, known)
        self._begins = [[call.fqn for call in calls if call.position >= start] for start in starts[1:]]
        return starts

    def _capture(self, example: FlatMicrobatch, training: bool) -> CapturedGraph:
        """Captured as it would run in a plain loop, also where the caller has switched autograd off."""
        with torch.inference_mode(False), torch.enable_grad():
            captured = capture(
                self.model, self.loss, example.microbatch(), self.place.device, training=training
            )
        check_output_leaves(captured)
        return captured

    def _table(self, stages: int, microbatches: int, *, training: bool) -> Schedule:
        given, ranks = self.options.schedule, self.place.ranks
        if isinstance(given, Schedule) and given.microbatches != microbatches:
            raise ScheduleError(
                f"the schedule {given.name!r} is for {given.microbatches} microbatches, this step has {microbatches}: "
                f"cut the batch into {given.microbatches}, or give a name or a function, which makes a table for any."
            )
        table = make_table(given, ranks, stages, microbatches)
        if training and not _trains(table):
            raise ScheduleError(
                f"the schedule {table.name!r} has forwards only: call pipe.eval, and leave out example=, or give a schedule "
                "with backwards to train."
            )
        check(table, ranks=ranks, stages=stages, microbatches=microbatches, training=_trains(table))
        return table

    def _check(self, table: Schedule, costs: Sequence[Costs], windows: Sequence[OffloadWindow]) -> None:
        """Raise where more is alive on a device than the caller allows."""
        ranks, stages, microbatches = table.ranks, table.stages, table.microbatches
        cap, away = self.options.memory.caps(self.place.ranks), windows if eviction_frees_memory(self.place.device) else ()
        check(table, ranks=ranks, stages=stages, microbatches=microbatches, costs=costs, memory_cap=cap, offloaded=away)


def check_alike(built: Sequence[Built]) -> None:
    """Raise `BatchError` where graphs cannot serve microbatches of one step: they must make the same results."""
    usual = _results(built[0])
    for index, each in enumerate(built):
        for what, found in _results(each).items():
            if found != usual[what]:
                raise BatchError(
                    f"microbatch {index} has a shape or structure for which the model makes other {what} than for microbatch "
                    "0: run them in steps of their own."
                )


def _results(built: Built) -> dict[str, object]:
    loss, stages = built.program.loss, built.program.stages
    return {
        "outputs": (str(built.captured.output_spec), built.captured.output_leaves),
        "numbers to report": built.program.metrics,
        "losses": loss.dtype if loss is not None else None,
        "gradients": [sorted(stage.gradients) for stage in stages],
    }


def _both(first: Hook, second: Hook) -> Hook:
    def hook(passed: PassResult) -> None:
        first(passed)
        second(passed)

    return hook


def _with_communication(table: Schedule, training: bool) -> Schedule:
    table = table if training else table.forward_only()
    return table if table.has_communication else add_send_recv(table)


def _trains(table: Schedule) -> bool:
    return any(leaf.kind is not Kind.F for _, _, action in table.cells() if action.is_compute for leaf in action.leaves)


def _splits_backward(table: Schedule) -> bool:
    return any(leaf.kind in (Kind.I, Kind.W) for _, _, action in table.cells() for leaf in action.leaves)


def _check_places(table: Schedule, built: Built) -> None:
    """Parameters stay on the ranks that the first table put them on, whatever table a number of microbatches gets."""
    before, now = built.plan.rank_of_stage, table.rank_of_stage
    for stage in (stage for stage, rank in before.items() if now[stage] != rank):
        raise ScheduleError(
            f"for {table.microbatches} microbatches the schedule {table.name!r} puts stage {stage} on rank {now[stage]}, and "
            f"for {built.plan.schedule.microbatches} it put it on rank {before[stage]}, where its parameters are: give every "
            "number of microbatches the same ranks, or step with one number."
        )


def _check_buffer_order(table: Schedule, built: Built) -> None:
    """A stage that writes buffers must see the microbatches in order, as a plain loop does."""
    for stage, fqn in built.written_buffers():
        order = [
            leaf.microbatch or 0
            for _, _, action in table.cells()
            for leaf in action.leaves
            if leaf.stage == stage.index and leaf.kind == "F"
        ]
        if order != sorted(order):
            raise ScheduleError(
                f"stage {stage.index} writes the buffer {fqn}, and the schedule runs its forwards in the order "
                f"{order}: a plain loop would write it in microbatch order. Reorder the forwards."
            )
