"""Runs a random program three ways: eager, as its uncut joint graph, and cut under a schedule; compares the numbers.

Contract: all three run `STEPS` steps over the same microbatches with seeds 1/microbatches, gradients kept from step to
step, buffers carried over. Cut against uncut is bit-equal (tied parameters' sums: 1e-6 relative); uncut against eager
is bit-equal or close, for a trace may call another kernel.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx

from graphpp.backends.choose_backend import FunctionCompiler
from graphpp.backends.regions import Regions, SizedCall
from graphpp.batch import microbatch as signature
from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.options.recompute import Recompute
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.passes.joint.key_dropout_and_random_ops import key_random_ops
from graphpp.passes.joint.views import relax_views
from graphpp.passes.lower import LoweringOptions, lower
from graphpp.passes.provenance import ProgramGraphs
from graphpp.passes.recompute.rematerialize import RecomputeBudget
from graphpp.passes.stage.emit import emit_outlined
from graphpp.passes.stage.outline_regions import outline_regions
from graphpp.passes.stage.split_dropout import split_dropout
from graphpp.planner import recompute_policy as policy
from graphpp.planner.layers import layers_of, module_calls
from graphpp.runtime import program as p
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.program import PipelineProgram
from graphpp.runtime.random_keys import step_keys
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.recompute import with_recompute
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.schedule import Schedule
from tests.fuzz.programs import Net, Program
from tests.passes.graphs import copied

STEPS = 2
SEED = 3  # of the generator from which the steps draw their keys
CPU = torch.device("cpu")
ANYTHING = 1.0  # seconds that a byte is worth: whatever is cheap runs again, however small
SAVINGS = (None, "free", "selective", 0.7, 0.3, 0.01)
ONE_PER_RANK = ("1F1B", "GPipe", "ZB1P", "ZB2P")
SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "MegatronInterleaved", "auto")


@dataclass(frozen=True)
class Cut:
    """Where stages start (thousandths of the forward, in any order); a schedule's name or a random order's seed.

    `region`: so many operations of the forward each are recomputed together; 0: none are. `rerun`: W may repeat views
    and pointwise operations. `saving`: besides, all that is cheap is made again ("free"), of the regions what is no
    contraction ("selective"), or, instead of whole regions, as much as brings a stage to a fraction of what it saves.
    `prepare`: what depends on parameters alone is made once per step. `outlined`: the programs call their regions, which a
    function of the caller's has compiled (into themselves). `ahead`: an R stands before each backward.
    """

    at: tuple[int, ...]
    schedule: str | int = "auto"
    microbatches: int = 2
    region: int = 0
    rerun: bool = False
    saving: str | float | None = None
    prepare: bool = False
    outlined: bool = False
    ahead: bool = False

    def choices(self) -> LoweringOptions:
        """What the recipe is asked for."""
        return replace(self._choices(), hoist_per_step=self.prepare, recompute_ahead=self.ahead)

    def _choices(self) -> LoweringOptions:
        region = (lambda node: node.meta["position"] // self.region) if self.region else None
        chosen = Recompute(nodes="selective") if self.saving == "selective" else Recompute(weight_grad=self.rerun)
        repeat = policy.may_repeat_in_weight_grad(chosen)
        if self.saving is None:
            return LoweringOptions(True, repeat, region)
        costs = OpCosts.of("cpu")
        if isinstance(self.saving, str):
            return LoweringOptions(True, repeat, region, policy.may_recompute(chosen), RecomputeBudget(ANYTHING, costs))
        budget = RecomputeBudget(ANYTHING, costs, self.saving, region or _whole)
        return LoweringOptions(True, repeat, recompute_budget=budget)

    def starts(self, joint: JointGraph) -> tuple[int, ...]:
        """The positions at which the stages begin."""
        length = 1 + max(node.meta["position"] for node in joint.computed())
        return (0, *sorted(at * length // 1000 for at in self.at))

    def table(self, ranks: int = 1) -> Schedule:
        """The checked schedule with communication."""
        stages = 1 + len(self.at)
        if isinstance(self.schedule, int):
            table = shuffled(stages, self.microbatches, self.schedule)
        else:
            table = SCHEDULES[self.schedule](ranks, stages, self.microbatches)
        if self.ahead:
            table = with_recompute(table, frozenset(product(range(stages), range(self.microbatches))))
        check(table, ranks=ranks, stages=stages, microbatches=self.microbatches)
        return add_send_recv(table)


def _whole(node: fx.Node) -> str:
    """One region for all."""
    return "all"


@dataclass
class Numbers:
    """What training steps leave behind; names are the model's FQNs."""

    losses: list[Tensor] = field(default_factory=list)
    grads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)


def cuts(most: int = 4) -> st.SearchStrategy[Cut]:
    """Up to `most` cuts anywhere, a named schedule or a random order, 1 to 4 microbatches."""
    order = st.sampled_from(ONE_PER_RANK + SEVERAL) | st.integers(0, 1000)
    at = st.lists(st.integers(0, 1000), min_size=1, max_size=most).map(tuple)
    region, saving = st.sampled_from([0, 0, 1, 5, 1000]), st.sampled_from(SAVINGS)
    flags = st.booleans(), saving, st.booleans(), st.booleans(), st.booleans()
    return st.builds(Cut, at, order, st.integers(1, 4), region, *flags)


def shuffled(stages: int, microbatches: int, seed: int) -> Schedule:
    """One rank that runs whatever is ready, at random; each stage's forwards stay in microbatch order.

    About half of the backwards are whole, the others I and, at any time after it, W.
    """
    choose = random.Random(seed)
    forwards = {stage: 0 for stage in range(stages)}
    backwards = {(stages - 1, microbatch) for microbatch in range(microbatches)}
    late: list[Action] = []
    row: list[Action] = []
    while forwards or backwards or late:
        ready = [Action(s, Kind.F, m) for s, m in forwards.items() if s == 0 or m < forwards.get(s - 1, microbatches)]
        whole = [Action(s, Kind.B, m) for s, m in sorted(backwards) if m < forwards.get(stages - 1, microbatches)]
        row.append(choose.choice([*ready, *whole, *late]))
        stage, kind, microbatch, _ = row[-1]
        assert microbatch is not None
        if kind is Kind.B:
            backwards.remove((stage, microbatch))
            backwards |= {(stage - 1, microbatch)} if stage else set()
            if choose.random() < 0.5:
                row[-1] = Action(stage, Kind.I, microbatch)
                late.append(Action(stage, Kind.W, microbatch))
        elif kind is Kind.W:
            late.remove(row[-1])
        elif microbatch + 1 < microbatches:
            forwards[stage] += 1
        else:
            del forwards[stage]
    return Schedule((tuple(row),), stages, microbatches, f"random order {seed}")


def captured(net: Net) -> JointGraph:
    """The joint graph of a program."""
    return capture(net, net.loss(), net.batch(1)[0], CPU).joint


def seeds(count: int) -> list[Tensor]:
    """The gradient of the mean loss with respect to each microbatch's loss."""
    return [torch.tensor(1.0) / count] * count


def run_uncut(net: Net, joint: JointGraph, microbatches: int) -> Numbers:
    """Interpret the captured graph in a plain loop, after those passes only that make it repeatable and runnable."""
    joint = relax_views(key_random_ops(_alive(copied(joint))))
    torch.manual_seed(SEED)
    numbers = Numbers(buffers={name: buffer.clone() for name, buffer in net.named_buffers()})
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    for _ in range(STEPS):
        keys = step_keys(microbatches, None, CPU) if p.RandomKey() in joint.inputs() else [0] * microbatches
        for batch, seed, key in zip(net.batch(microbatches), seeds(microbatches), keys, strict=True):
            known = _known(joint, batch) | {p.Parameter(name): value for name, value in parameters.items()}
            known |= {p.Seed(): seed, p.RandomKey(): key}
            _one_microbatch(joint, known, numbers)
    return numbers


def _alive(joint: JointGraph) -> JointGraph:
    """Without unused nodes: random operators are counted, and a dead one is not."""
    for node in reversed(list(joint.computed())):
        if not node.users:
            joint.graph.erase_node(node)
    return joint


def _known(joint: JointGraph, batch: Microbatch) -> dict[p.InputRole, Any]:
    known: dict[p.InputRole, Any] = {p.Input(path): value for path, value in signature.tensors_by_path(batch).items()}
    known.update((p.Constant(name), value) for name, value in joint.constants.items())
    return known


def _one_microbatch(joint: JointGraph, known: Mapping[p.InputRole, Any], numbers: Numbers) -> None:
    buffers = {p.Buffer(name): value for name, value in numbers.buffers.items()}
    values = {**known, **buffers}
    with torch.no_grad():
        results = fx.Interpreter(joint.module, graph=joint.graph).run(*(values[role] for role in joint.inputs()))
        for (role, _), value in zip(joint.outputs(), results, strict=True):
            if isinstance(role, p.Loss):
                numbers.losses.append(value.clone())
            elif isinstance(role, p.BufferUpdate):
                numbers.buffers[role.fqn] = value.clone()
            elif isinstance(role, p.Gradient):
                before = numbers.grads.get(role.fqn)
                numbers.grads[role.fqn] = value.clone() if before is None else before + value


def run_eager(net: Net, microbatches: int) -> Numbers:
    """The plain loop with autograd; changes `net`."""
    numbers, loss = Numbers(), net.loss()
    for _ in range(STEPS):
        for batch in net.batch(microbatches):
            output = net(*batch.args, **batch.kwargs)
            value = output["loss"] if loss is None else loss(output, batch.target)
            (value / microbatches).backward()
            numbers.losses.append(value.detach())
    return _collected(net, numbers)


def run_cut(net: Net, compiled: PipelineProgram, cut: Cut) -> Numbers:
    """All stages in this process; changes `net`."""
    runner = GraphPPRunner(compiled, cut.table(), ModelState(net), RankPlace(CPU, None))
    return run_steps(net, runner, cut.microbatches)


def run_steps(net: Net, runner: GraphPPRunner, microbatches: int) -> Numbers:
    """Training steps of a runner; the numbers of this rank."""
    torch.manual_seed(SEED)
    numbers = Numbers()
    for _ in range(STEPS):
        inputs = [signature.tensors_by_path(batch) for batch in net.batch(microbatches)]
        runner.step(inputs, seeds(microbatches))
        numbers.losses.extend(runner.losses().unbind())
    return _collected(net, numbers)


def _collected(net: Net, numbers: Numbers) -> Numbers:
    numbers.grads = {name: value.grad for name, value in net.named_parameters() if value.grad is not None}
    numbers.buffers = dict(net.named_buffers())
    return numbers


def tied(compiled: PipelineProgram) -> set[str]:
    """Parameters whose gradient several stages contribute to: their sums may round differently."""
    names = [fqn for stage in compiled.stages for fqn in stage.gradients]
    return {name for name in names if names.count(name) > 1}


def differences(ours: Numbers, theirs: Numbers, loose: Mapping[str, float] | None = None) -> list[str]:
    """What differs; gradients in `loose` only by more than their tolerance, relative to the largest element."""
    found = []
    if set(ours.grads) != set(theirs.grads):
        found.append(f"gradients of {sorted(ours.grads)} instead of {sorted(theirs.grads)}")
    if len(ours.losses) != len(theirs.losses):
        found.append(f"{len(ours.losses)} losses instead of {len(theirs.losses)}")
    for name, left, right in _pairs(ours, theirs):
        tolerance = (loose or {}).get(name, (loose or {}).get("*", 0.0))
        if left.dtype != right.dtype or left.shape != right.shape or not _equal(left, right, tolerance):
            found.append(f"{name}: {left} instead of {right}")
    return found


def _pairs(ours: Numbers, theirs: Numbers) -> Iterator[tuple[str, Tensor, Tensor]]:
    for index, (left, right) in enumerate(zip(ours.losses, theirs.losses, strict=False)):
        yield f"loss {index}", left, right
    for mine, other in ((ours.grads, theirs.grads), (ours.buffers, theirs.buffers)):
        yield from ((name, mine[name], other[name]) for name in sorted(mine.keys() & other.keys()))


def _equal(left: Tensor, right: Tensor, tolerance: float) -> bool:
    if not tolerance or not left.is_floating_point():
        return torch.equal(left.nan_to_num(), right.nan_to_num()) and torch.equal(left.isnan(), right.isnan())
    size = right.abs().max().item() if right.numel() else 0.0
    return torch.allclose(left, right, rtol=0, atol=tolerance * max(size, 1e-3), equal_nan=True)


def lowered(joint: JointGraph, cut: Cut) -> PipelineProgram:
    """Stage programs of a copy of the joint graph."""
    sources = ProgramGraphs()
    compiled = lower(copied(joint), cut.starts(joint), sources.hook(), cut.choices())
    return _outlined(joint, compiled, sources) if cut.outlined else compiled


def _outlined(joint: JointGraph, pipeline: PipelineProgram, sources: ProgramGraphs) -> PipelineProgram:
    """The programs under a backend that runs each region as it is, all in this process."""
    layer, regions = layers_of(module_calls(joint)), Regions(FunctionCompiler(lambda module, examples: module))

    def exchanged(item: p.Program) -> p.Program:
        made = outline_regions(split_dropout(sources.of(item)), layer)
        calls = [SizedCall(call, None) for call in made.calls]
        for call in regions.new(calls):
            regions.compile(call)
        regions.bind(calls)
        return emit_outlined(item, made)

    def stage(each: p.StageProgram) -> p.StageProgram:
        return replace(each, programs={phase: exchanged(item) for phase, item in each.programs.items()})

    return replace(pipeline, stages=tuple(map(stage, pipeline.stages)))


def compare(program: Program, joint: JointGraph, cut: Cut, uncut: Numbers) -> list[str]:
    """Differences between the cut program and the uncut joint graph."""
    compiled = lowered(joint, cut)
    ours = run_cut(Net(program), compiled, cut)
    return differences(ours, uncut, dict.fromkeys(tied(compiled), 1e-6))


def uncut_by_count(program: Program, joint: JointGraph, counts: Sequence[int]) -> dict[int, Numbers]:
    """The uncut numbers for each number of microbatches."""
    return {count: run_uncut(Net(program), joint, count) for count in sorted(set(counts))}
