"""GraphPPRunner: runs stage programs under torch's pipeline runtime, over one table of actions.

Contract
--------
- Every schedule is a table with communication, already checked, and runs here; one process with all stages local is the
  case without sends. The loop is torch's (`_PipelineScheduleRuntime`, `backward_requires_autograd=False`); what an action
  does is one handler per kind, below.
- After `step`: the losses of all microbatches on every rank; gradients in `param.grad`, accumulated in microbatch order.
- After a failure nothing of the step is held.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from graphpp.runtime._torch_pipelining import ActionLoop
from graphpp.runtime.actions import COMMUNICATION, SENDS, Action, Kind
from graphpp.runtime.gradients import Subgroups, TiedReduction, dtype_of_sum
from graphpp.runtime.offload import Offloader, Staying
from graphpp.runtime.overlap import OverlapPart, Overlaps
from graphpp.runtime.products import Products
from graphpp.runtime.program import Phase, PipelineProgram
from graphpp.runtime.randomness import step_keys
from graphpp.runtime.recorder import Recorder
from graphpp.runtime.replicas import Replicas
from graphpp.runtime.schedule import Schedule
from graphpp.runtime.stage import Feed, GraphStage, Place, Variant
from graphpp.runtime.state import ModelState
from graphpp.runtime.transport import Message, Parcel, Transport

_OPS = {
    Kind.SEND_F: GraphStage.get_fwd_send_ops,
    Kind.SEND_B: GraphStage.get_bwd_send_ops,
    Kind.RECV_F: GraphStage.get_fwd_recv_ops,
    Kind.RECV_B: GraphStage.get_bwd_recv_ops,
}


@dataclass(frozen=True)
class Device:
    """Where a pipeline runs: the device and the process group (None: one process)."""

    device: torch.device
    group: dist.ProcessGroup | None

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group) if self.group is not None else 0

    @property
    def ranks(self) -> int:
        """Ranks in the group."""
        return dist.get_world_size(self.group) if self.group is not None else 1


class GraphPPRunner:
    """Runs captured graphs under one schedule; `training` programs have F and B, evaluation programs E.

    `programs`: one for all microbatches, or one for each: microbatches of one shape share theirs. They have the same
    stages, gradients and metrics. `owners` has the ranks that hold each parameter, `sums` is the dtype in which gradients of
    narrower parameters add up, `replicas` the ranks whose gradients are averaged.
    """

    def __init__(
        self,
        programs: PipelineProgram | Sequence[PipelineProgram],
        schedule: Schedule,
        state: ModelState,
        place: Device,
        *,
        owners: Mapping[str, Sequence[int]] | None = None,
        subgroups: Subgroups | None = None,
        sums: torch.dtype | None = None,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        self.schedule, self.state, self.place, self._sums = schedule, state, place, sums
        each = [programs] * schedule.microbatches if isinstance(programs, PipelineProgram) else list(programs)
        self.program, self.programs = each[0], tuple(each)
        self.random = any(program.random for program in each)
        batched = any(action.kind is Kind.P2P for _, _, action in schedule.cells())
        self.transport = Transport(place.group, place.device, batched=batched)
        self.stages = self._local_stages(each)
        self.training = Phase.FORWARD in self.program.stages[0].programs
        self._bubble = 0.0
        self._replicas, self._shared_out = Replicas(replicas), set[int]()
        ranks = owners if owners is not None else ranks_of_parameters(self.program, schedule.rank_of_stage)
        groups = subgroups or Subgroups(place.group)
        self.tied = TiedReduction(_contributors(self.program), ranks, schedule.rank_of_stage, groups)
        self.overlaps = Overlaps(())  # for whoever has woven programs to exchange
        self.offloader: Offloader[Any] = Offloader((), {}, Staying())  # for whoever has planned trips to exchange
        self._recorder: Recorder | None = None
        watched = {kind: self._watched(handler) for kind, handler in self._handlers().items()}
        self._loop = ActionLoop(list(self.stages.values()), schedule, watched) if self.stages else None

    def _local_stages(self, each: Sequence[PipelineProgram]) -> dict[int, GraphStage]:
        """This rank's stages by index, each with its variant for every microbatch."""
        rank_of, stages = self.schedule.rank_of_stage, len(self.program.stages)
        where = Place(stages, rank_of, self.place.rank, self.place.ranks)
        local: dict[int, GraphStage] = {}
        for index in (index for index in range(stages) if rank_of[index] == self.place.rank):
            distinct = {id(program.stages[index]): program for program in each}
            variants = {key: Variant.of(program, index) for key, program in distinct.items()}
            own = [variants[id(program.stages[index])] for program in each]
            local[index] = GraphStage(index, own, where, self.transport)
        return local

    def multiply_with(self, products: Products) -> None:
        """Let other kernels than torch's make the products that fused programs add to gradients."""
        for stage in self.stages.values():
            stage.gradients.products = products

    def step(self, inputs: Sequence[Mapping[str, torch.Tensor]], seeds: Sequence[torch.Tensor]) -> None:
        """Run the table once over the microbatches' tensors (by path) and seeds (0-dim, one per microbatch)."""
        self.transport.waited, began = 0.0, time.perf_counter()
        try:
            with torch.no_grad(), _current(self.place.device):
                keys = step_keys(len(inputs), self.place.group, self.place.device) if self.random else ()
                self._begin(Feed(inputs, seeds, keys))
                if self._loop is not None:  # a rank without a stage has nothing to do
                    self._loop.run()
                self.transport.flush()
                self._finish()
            self._bubble = self.transport.waited / max(time.perf_counter() - began, 1e-9)
        except BaseException:
            self._drop()
            raise
        finally:
            for stage in self.stages.values():
                stage.end()

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """A step run meanwhile is recorded."""
        self._recorder, self.transport.on_wait = recorder, recorder.waiting
        try:
            yield
        finally:
            self._recorder = self.transport.on_wait = None

    def _watched(self, handler: Callable[[Action], None]) -> Callable[[Action], None]:
        """The handler, seen by a recorder where there is one. (torch's loop names each action to its profiler itself.)"""

        def run(action: Action) -> None:
            if self._recorder is None:
                handler(action)
            else:
                self._recorder.run(handler, action)

        return run

    @property
    def bubble(self) -> float | None:
        """The share of the last step in which this process stood still for messages; None on CUDA, where it does not."""
        return self._bubble if self.place.device.type == "cpu" else None

    def _drop(self) -> None:
        """Forget a step that failed."""
        self.transport.drop()
        self._replicas.drop()
        self.offloader.drop()
        for stage in self.stages.values():
            stage.clear()
            stage.gradients.start({})

    def losses(self) -> torch.Tensor:
        """The losses of the last step, one per microbatch in order, [microbatches]; on every rank."""
        stage, meta = len(self.program.stages) - 1, self.program.loss
        assert meta is not None, "evaluation without a target has no loss"
        local = self.stages.get(stage)
        if local is not None:
            losses = torch.stack([local.losses.pop(index) for index in range(self.schedule.microbatches)])
        else:
            losses = torch.empty(self.schedule.microbatches, dtype=meta.dtype, device=self.place.device)
        if self.place.ranks > 1:
            dist.broadcast(losses, group=self.place.group, group_src=self.schedule.rank_of_stage[stage])
        return losses

    def metrics(self) -> dict[str, torch.Tensor]:
        """The reported numbers of the last step by name, one per microbatch in order, [microbatches]; on every rank."""
        stage, dtypes = len(self.program.stages) - 1, self.program.metrics
        if not dtypes:
            return {}
        local = self.stages.get(stage)
        table = torch.zeros(self.schedule.microbatches, len(dtypes), dtype=torch.float64, device=self.place.device)
        for index, row in enumerate(table if local is not None else ()):
            row.copy_(torch.stack([local.metrics[index][name].double() for name in dtypes]))  # type: ignore[union-attr]
        if self.place.ranks > 1:
            dist.broadcast(table, group=self.place.group, group_src=self.schedule.rank_of_stage[stage])
        return {name: column.to(dtype) for (name, dtype), column in zip(dtypes.items(), table.unbind(1), strict=True)}

    def take_outputs(self) -> list[dict[int, torch.Tensor]] | None:
        """The output's tensor leaves per microbatch, on the last stage's rank, handed over once; None elsewhere."""
        last = self.stages.get(len(self.program.stages) - 1)
        if last is None:
            return None
        return [last.outputs.pop(index, {}) for index in range(self.schedule.microbatches)]

    def _begin(self, feed: Feed) -> None:
        self._shared_out.clear()
        for stage in self.stages.values():
            stage.begin(self.state.tensor, feed)
            parameters = {fqn: self.state.tensor(fqn) for fqn in stage.gradients.fqns}
            grads = {fqn: parameter.grad for fqn, parameter in parameters.items() if fqn not in self.tied.contributors}
            dtypes = {fqn: dtype_of_sum(parameter, self._sums) for fqn, parameter in parameters.items()}
            stage.gradients.start({fqn: grad for fqn, grad in grads.items() if grad is not None}, dtypes)

    def _finish(self) -> None:
        """Gradients into `param.grad`: averaged over the replicas, parts of tied parameters added first."""
        if not self.training:
            return
        for index in self.stages:
            self._share_out(index)
        tied = self.tied.reduce(lambda stage, fqn: self.stages[stage].gradients.sums[fqn], self._room)
        self._replicas.start(tied.values())
        self._replicas.finish()
        for stage in self.stages.values():
            for fqn in self._own(stage):
                parameter = self.state.tensor(fqn)
                parameter.grad = stage.gradients.sums[fqn].to(dtype=parameter.grad_dtype)
        for fqn, total in tied.items():
            parameter = self.state.tensor(fqn)
            added = total.to(dtype=parameter.grad_dtype) if parameter.grad is None else parameter.grad.add_(total)
            parameter.grad = added
        for stage in self.stages.values():
            stage.gradients.start({})

    def _own(self, stage: GraphStage) -> list[str]:
        """FQNs of the parameters of which this stage alone has the gradient, summed over the microbatches."""
        return [fqn for fqn in stage.gradients.sums if fqn not in self.tied.contributors]

    def _share_out(self, index: int) -> None:
        """Start to average a stage's gradients over the replicas, once a step."""
        if index not in self._shared_out:
            self._shared_out.add(index)
            stage = self.stages[index]
            self._replicas.start(stage.gradients.sums[fqn] for fqn in self._own(stage))

    def _room(self, fqn: str) -> torch.Tensor:
        """Memory for another rank's sum of gradients of a parameter."""
        parameter = self.state.tensor(fqn)
        dtype = dtype_of_sum(parameter, self._sums)
        return torch.empty(parameter.shape, dtype=dtype, device=self.place.device)

    def _handlers(self) -> dict[Kind, Callable[[Action], None]]:
        return {
            **dict.fromkeys((Kind.F, Kind.B, Kind.I, Kind.W), self._offloading(self._compute)),
            Kind.OVERLAP_F_B: self._offloading(self._overlap),
            Kind.REDUCE_GRAD: lambda action: self._share_out(action.stage),
            Kind.UNSHARD: _nothing,
            Kind.RESHARD: _nothing,
            **dict.fromkeys(COMMUNICATION, self._communicate),
        }

    def _offloading(self, compute: Callable[[Action], None]) -> Callable[[Action], None]:
        """A computation, with the saved values there that it reads."""

        def run(action: Action) -> None:
            self.offloader.before(action)
            compute(action)
            self.offloader.after(action)

        return run

    def _compute(self, action: Action) -> None:
        stage, microbatch = self._target(action)
        stage.run(self._phase(action), microbatch)
        self._pass_on(action)

    def _pass_on(self, action: Action) -> None:
        """Hand what an action made to the neighbouring stage, if that is on this rank too; weight gradients stay."""
        direction, step = ("F", 1) if action.kind is Kind.F else ("B", -1)
        neighbour = self.stages.get(action.stage + step)
        if neighbour is not None and action.kind is not Kind.W:
            stage, microbatch = self._target(action)
            neighbour.arrive(direction, microbatch, stage.take_leaving(direction, microbatch))

    def _overlap(self, action: Action) -> None:
        targets = [(part, *self._target(part)) for part in action.parts]
        if self.overlaps.run([OverlapPart(stage, self._phase(part), microbatch) for part, stage, microbatch in targets]):
            for part in action.parts:
                self._pass_on(part)
        else:
            for part in action.parts:
                self._compute(part)

    def _phase(self, action: Action) -> Phase:
        return Phase(action.kind.value) if self.training else Phase.EVALUATE

    def _communicate(self, action: Action) -> None:
        self.transport.start([self._parcel(part) for part in action.leaves])

    def _parcel(self, action: Action) -> Parcel:
        """One send or receive, not posted yet."""
        stage, microbatch = self._target(action)
        ops = _OPS[action.kind](stage, microbatch)
        direction = "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
        if action.kind in SENDS:
            return Parcel(Message([], [op.tensor for op in ops], stage.peer(direction)), ops, outgoing=True)
        return Parcel(stage.arriving(direction, microbatch), ops)

    def _target(self, action: Action) -> tuple[GraphStage, int]:
        assert action.microbatch is not None, f"{action} names no microbatch"
        return self.stages[action.stage], action.microbatch


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device as CUDA's current one: the caller's may be another, as with two pipelines in one process."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _nothing(action: Action) -> None:
    """UNSHARD and RESHARD: parameters are whole on their rank."""


def _contributors(program: PipelineProgram) -> dict[str, list[int]]:
    """For each parameter that is trained the stages that contribute to its gradient, ascending."""
    stages: dict[str, list[int]] = {}
    for stage in program.stages:
        for fqn in stage.gradients:
            stages.setdefault(fqn, []).append(stage.index)
    return stages


def ranks_of_parameters(program: PipelineProgram, rank_of_stage: Mapping[int, int]) -> dict[str, list[int]]:
    """For each parameter the ranks that hold it, ascending; the first one counts it."""
    found: dict[str, set[int]] = {}
    for stage in program.stages:
        for fqn in stage.parameters:
            found.setdefault(fqn, set()).add(rank_of_stage[stage.index])
    return {fqn: sorted(ranks) for fqn, ranks in found.items()}
