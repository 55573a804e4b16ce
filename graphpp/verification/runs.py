"""Run one step of a model in three ways: in plain eager, as its uncut joint graph, and as stage programs.

- All three start from the same parameters, buffers and random state, without gradients, with the same microbatches and seeds
  (the gradient of the step's loss by each microbatch's loss).
- Random operators draw equal numbers in all three, if eager runs the joint graph's random operators in order.
- With `jitter` every value of the uncut run is moved by units in the last place at random when computed (Monte Carlo
  arithmetic, Parker 1997). The results then show the effect of rounding on this step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import aot
from graphpp._torch.operators.flex_attention import trains_on_cpu
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.capture.loss import LossFunction, loss_and_metrics
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.graph.joint_graph import JointGraph, is_tensor, remove_unused
from graphpp.passes.joint.key_dropout_and_random_ops import draws_random_numbers, key_random_ops
from graphpp.passes.joint.views import memory_order, relax_views
from graphpp.runtime import program
from graphpp.runtime.dtensors import value_of
from graphpp.runtime.gradients.accumulate import dtype_of_sum
from graphpp.runtime.model_state import ModelState, state_restored
from graphpp.runtime.parameter_rows import joined_rows, whole_name
from graphpp.runtime.program import PipelineProgram
from graphpp.runtime.random_keys import seeded, step_keys
from graphpp.runtime.runner import GraphPPRunner, RunnerConfig
from graphpp.schedules.table.schedule import Schedule

Tensors = dict[str, torch.Tensor]
ValueHook = Callable[[int, Mapping[str, Any]], None]


class Jitter:
    """Moves the elements of values by `units` in the last place, up or down at random."""

    def __init__(self, seed: int, units: int = 1) -> None:
        self._generator, self._units = torch.Generator().manual_seed(seed), units

    def move(self, value: torch.Tensor) -> torch.Tensor:
        signs = torch.randint(0, 2, value.shape, generator=self._generator, dtype=torch.int8).to(value.device) * 2 - 1
        return value * (1 + self._units * torch.finfo(value.dtype).eps * signs.to(value.dtype))


@dataclass
class Numbers:
    """The results of a step: losses per microbatch, gradients and buffers by FQN."""

    losses: list[torch.Tensor] = field(default_factory=list)
    grads: Tensors = field(default_factory=dict)
    buffers: Tensors = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """The input of all three runs.

    `seeds`: per microbatch the 0-dim gradient of the step's loss by its loss. `sum_dtype`: the option `gradients.dtype`, in
    which stage programs and the uncut graph sum gradients; eager sums in the gradient's dtype. `written`: FQNs of buffers and
    frozen parameters that the forward writes.
    """

    model: nn.Module
    loss: LossFunction | None
    parts: Sequence[FlatMicrobatch]
    seeds: Sequence[torch.Tensor]
    device: torch.device
    sum_dtype: torch.dtype | None = None
    written: Sequence[str] = ()

    def restored(self) -> contextlib.AbstractContextManager[None]:
        return state_restored(self.model, self.device, self.written)

    def buffers(self) -> Tensors:
        """Copies of the buffers, and of the frozen parameters that the forward writes."""
        frozen = [(name, value) for name, value in self.model.named_parameters() if name in self.written]
        return {name: value.detach().clone() for name, value in (*self.model.named_buffers(), *frozen)}

    def left_behind(self, losses: Sequence[torch.Tensor]) -> Numbers:
        grads = {name: value.grad for name, value in self.model.named_parameters() if value.grad is not None}
        return Numbers(list(losses), grads, self.buffers())


def repeatable(joint: JointGraph) -> JointGraph:
    """A copy of a captured graph after only the passes that make it repeatable and runnable."""
    copy = joint.copy()
    remove_unused(copy.graph)
    return relax_views(key_random_ops(copy))


def run_uncut(step: Step, joint: JointGraph, watch: ValueHook | None = None, jitter: Jitter | None = None) -> Numbers:
    """Interpret the joint graph for each microbatch; `watch` gets a microbatch's index and values by name."""
    numbers = Numbers(buffers=step.buffers())
    known: dict[program.InputRole, Any] = {program.Constant(name): value for name, value in joint.constants.items()}
    own = dict(step.model.named_parameters())
    read = [role for role in joint.inputs() if isinstance(role, program.Parameter)]
    known |= {role: value_of(role.fqn, own[whole_name(role.fqn)]) for role in read}
    for index, (part, key) in enumerate(zip(step.parts, step_keys(len(step.parts), None, step.device), strict=True)):
        given = known | {program.Input(path): value for path, value in part.tensors.items()}
        given |= {program.Buffer(name): value for name, value in numbers.buffers.items()}
        given |= {program.Seed(): step.seeds[index], program.RandomKey(): key}
        interpreter = _Watched(joint, jitter)
        with torch.no_grad(), torch.autocast(step.device.type, enabled=False):  # the graph contains autocast's casts
            results = interpreter.run(*(given[role] for role in joint.inputs()))
            _file(joint, results, numbers, step)
        if watch is not None:
            watch(index, interpreter.values)
    for fqn, total in numbers.grads.items():
        numbers.grads[fqn] = total.to(dtype_of_sum(step.model.get_parameter(whole_name(fqn)), None))
    numbers.grads = joined_rows(numbers.grads)
    return numbers


class _Watched(fx.Interpreter):
    """Interprets a graph and keeps every value by its node's name; `jitter` moves each."""

    def __init__(self, joint: JointGraph, jitter: Jitter | None) -> None:
        super().__init__(joint.module, graph=joint.graph)
        self.values: dict[str, Any] = {}
        self._jitter = jitter

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if self._jitter is not None and aot.rounds(value):
            value = self._jitter.move(value)
        self.values[n.name] = value
        return value


def _file(joint: JointGraph, results: Sequence[torch.Tensor], numbers: Numbers, step: Step) -> None:
    for (role, _), value in zip(joint.outputs(), results, strict=True):
        match role:
            case program.Loss():
                numbers.losses.append(value.clone())
            case program.BufferUpdate(fqn):
                numbers.buffers[fqn] = value.clone()
            case program.Gradient(fqn):
                before, dtype = numbers.grads.get(fqn), dtype_of_sum(step.model.get_parameter(whole_name(fqn)), step.sum_dtype)
                numbers.grads[fqn] = value.to(dtype, copy=True) if before is None else before + value


def run_cut(step: Step, programs: Sequence[PipelineProgram], schedule: Schedule) -> Numbers:
    """Run the stage programs of each microbatch by the pipeline's runner, under a schedule of one rank."""
    config = RunnerConfig(sum_dtype=step.sum_dtype)
    runner = GraphPPRunner(programs, schedule, ModelState(step.model), RankPlace(step.device, None), config)
    with torch.autocast(step.device.type, enabled=False):
        runner.step([part.tensors for part in step.parts], step.seeds)
    return step.left_behind(runner.losses().unbind())


def run_eager(step: Step, joint: JointGraph) -> tuple[Numbers, bool]:
    """Run the plain loop with autograd; returns results, and whether its random operators were the joint graph's."""
    expected = [_Draw.of(node) for node in joint.computed() if node.target is seeded]
    losses, matched = list[torch.Tensor](), True
    for part, seed, key in zip(step.parts, step.seeds, step_keys(len(step.parts), None, step.device), strict=True):
        batch, keyed = part.microbatch(), _Keyed(key, expected)
        with keyed if expected else contextlib.nullcontext(), trains_on_cpu():
            (_, loss), *_ = loss_and_metrics(step.loss, step.model(*batch.args, **batch.kwargs), batch)
            keyed.forward = False
            with torch.autocast(step.device.type, enabled=False):
                loss.backward(seed)
        losses.append(loss.detach())
        matched = matched and keyed.matched
    return step.left_behind(losses), matched


@dataclass(frozen=True)
class _Draw:
    """A random operator of the joint graph: its kind, and the memory order of its one tensor input (see `relax_views`)."""

    kind: str
    order: Sequence[int] | None

    @classmethod
    def of(cls, node: fx.Node) -> _Draw:
        tensors = list(filter(is_tensor, node.all_input_nodes))
        return cls(_kind(node.args[2]), memory_order(tensors[0].meta["val"]) if len(tensors) == 1 else None)


class _Keyed(aot.DispatchMode):
    """Random operators of an eager forward draw the numbers of their counterparts in the joint graph."""

    def __init__(self, key: int, expected: Sequence[_Draw]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.forward = True
        self._key, self._expected, self._drawn = key, expected, list[str]()

    @property
    def matched(self) -> bool:
        """Whether eager ran the random operators of the joint graph, in the same order."""
        return self._drawn == [draw.kind for draw in self._expected]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws_random_numbers(func, args, kwargs):
            return func(*args, **kwargs)
        self._drawn.append(_kind(func) if self.forward else "a recomputation")
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        index = len(self._drawn) - 1
        order = self._expected[index].order if index < len(self._expected) else None
        if order is None or len(tensors) != 1 or tensors[0].dim() != len(order):
            return seeded(self._key, index, func, *args, **kwargs)
        (value,) = tensors
        ordered = value.permute(*order).contiguous().permute(*sorted(range(len(order)), key=order.__getitem__))
        result = seeded(self._key, index, func, *(ordered if each is value else each for each in args), **kwargs)
        return value.copy_(ordered) if func._schema.is_mutable else result


def _kind(operator: Any) -> str:
    """An operator's name, equal for its in-place form."""
    name = str(getattr(operator, "overloadpacket", operator)).rstrip("_")
    return "aten.bernoulli" if name == "aten.native_dropout" else name  # eager's dropout on CPU draws the same numbers
