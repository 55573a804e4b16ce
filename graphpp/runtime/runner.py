"""GraphPPRunner: runs stage programs under torch's pipeline runtime, over one table of actions.

Contract
--------
- The schedule is a table with communication that the checker has accepted. One process with all stages local runs the same
  code, without sends and receives.
- A runner is finished when its constructor returns: each action of this rank's row is bound to the function that does it. A
  step calls these functions in order.
- After `step`: the losses of all microbatches are available on every rank, and `param.grad` has the gradients, accumulated in
  microbatch order.
- After a step that failed, the runner holds no value of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from graphpp._torch.autograd import with_gradient_hooks
from graphpp.parallel.data_parallel import Replicas
from graphpp.parallel.groups import Subgroups
from graphpp.parallel.place import RankPlace
from graphpp.runtime.gradients.accumulate import dtype_of_sum
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel
from graphpp.runtime.gradients.tied import TiedReduction
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.offloader import Mover, Offloader, mover_for
from graphpp.runtime.overlapped_actions import OverlappedActions
from graphpp.runtime.program import Phase, PipelineProgram, WovenProgram
from graphpp.runtime.randomness import step_keys
from graphpp.runtime.recorder import ActionFunction, Recorder
from graphpp.runtime.stage import GraphStage, StageLocation, Variant
from graphpp.runtime.task import StepInputs, Task
from graphpp.runtime.transport import DEPTH, PendingMessage, Transport
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.table.actions import SENDS, Action, Kind, upstream
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

if TYPE_CHECKING:
    from graphpp.runtime.action_loop import ActionLoop


@dataclass(frozen=True)
class RunnerConfig:
    """The optional parts of a runner; the defaults suit one process that runs programs as they are.

    `owners`: the ranks that hold each parameter, by FQN (None: the ranks of the stages that use it). `subgroups`: makes their
    process groups (None: new ones). `sum_dtype`: the dtype in which gradients of narrower parameters add up. `replicas`: the
    ranks among which gradients are averaged. `kernel`: multiplies the gradients of fused programs (None: torch does). `woven`:
    the programs of overlapped actions. `offload`: when saved values are in the host's memory; `mover` copies them (None: the
    one for the pipeline's device).
    """

    owners: Mapping[str, Sequence[int]] | None = None
    subgroups: Subgroups | None = None
    sum_dtype: torch.dtype | None = None
    replicas: dist.ProcessGroup | None = None
    kernel: MatmulKernel | None = None
    woven: Sequence[WovenProgram] = ()
    offload: Sequence[OffloadWindow] = ()
    mover: Mover[Any] | None = None


class GraphPPRunner:
    """Runs captured graphs under one schedule; `training` programs have F and B, evaluation programs E.

    `programs`: one for all microbatches, or one for each; microbatches of one shape share theirs. All have the same stages,
    gradients and metrics.
    """

    def __init__(
        self,
        programs: PipelineProgram | Sequence[PipelineProgram],
        schedule: Schedule,
        state: ModelState,
        place: RankPlace,
        config: RunnerConfig | None = None,
    ) -> None:
        config = config or RunnerConfig()
        self.schedule, self.state, self.place, self._sum_dtype = schedule, state, place, config.sum_dtype
        each = [programs] * schedule.microbatches if isinstance(programs, PipelineProgram) else list(programs)
        self.program, self.programs = each[0], tuple(each)
        self.random = any(program.random for program in {id(program): program for program in each}.values())
        batched = any(action.kind is Kind.P2P for _, _, action in schedule.cells())
        self.transport = Transport(place.group, place.device, batched=batched)
        self.stages = self._local_stages(each, config.kernel)
        self.training = Phase.FORWARD in self.program.stages[0].programs
        self._bubble = 0.0
        read = frozenset[str]().union(*(stage.reads.union(stage.gradients.fqns) for stage in self.stages.values()))
        self._reader, self._tensors = state.reader(sorted(read)), dict[str, torch.Tensor]()
        self.hooked: frozenset[str] = frozenset()  # FQNs of this rank's parameters with hooks on gradients, in the last step
        self._replicas, self._reduced = Replicas(config.replicas), set[int]()
        ranks = config.owners if config.owners is not None else ranks_of_parameters(self.program, schedule.rank_of_stage)
        groups = config.subgroups or Subgroups(place.group)
        self.tied = TiedReduction(_contributors(self.program), ranks, schedule.rank_of_stage, groups)
        self.overlaps = OverlappedActions(config.woven)
        self.offloader = Offloader(config.offload, self.stages, config.mover or mover_for(place.device))
        self._recorder: Recorder | None = None
        self._loop = self._bound_loop() if self.stages else None  # a rank without a stage runs no actions

    def _local_stages(self, each: Sequence[PipelineProgram], kernel: MatmulKernel | None) -> dict[int, GraphStage]:
        """This rank's stages by index, each with its variant for every microbatch."""
        rank_of, stages = self.schedule.rank_of_stage, len(self.program.stages)
        location = StageLocation(stages, rank_of, self.place.rank, self.place.ranks)
        local: dict[int, GraphStage] = {}
        for index in (index for index in range(stages) if rank_of[index] == self.place.rank):
            distinct = {id(program.stages[index]): program for program in each}
            variants = {key: Variant.of(program, index) for key, program in distinct.items()}
            own = [variants[id(program.stages[index])] for program in each]
            local[index] = GraphStage(index, own, location, self.transport, kernel)
        return local

    def step(self, inputs: Sequence[Mapping[str, torch.Tensor]], seeds: Sequence[torch.Tensor]) -> None:
        """Run the table once.

        `inputs`: each microbatch's tensors by path; `seeds`: each microbatch's gradient of the loss, 0-dim. Raises `PeerLost`
        if a rank is lost.
        """
        self.transport.waited, began = 0.0, time.perf_counter()
        try:
            with torch.no_grad(), _current(self.place.device):
                keys = step_keys(len(inputs), self.place.group, self.place.device) if self.random else ()
                self._begin(StepInputs(inputs, seeds, keys))
                if self._loop is not None:
                    self._loop.run(None if self._recorder is None else self._recorder.run)
                self.transport.flush()
                self._finish()
            self._bubble = self.transport.waited / max(time.perf_counter() - began, 1e-9)
        except BaseException:
            self._drop()
            raise
        finally:
            self._tensors.clear()
            for stage in self.stages.values():
                stage.end()

    @contextlib.contextmanager
    def recording(self, recorder: Recorder) -> Iterator[None]:
        """Record the times of a step that runs inside this context."""
        self._recorder, self.transport.on_wait = recorder, recorder.waiting
        try:
            yield
        finally:
            self._recorder = self.transport.on_wait = None

    @property
    def bubble(self) -> float | None:
        """The share of the last step, 0 to 1, that this process waited for messages; None on CUDA."""
        return self._bubble if self.place.device.type == "cpu" else None

    def _drop(self) -> None:
        """Drop all values of a step that failed."""
        self.transport.drop()
        self._replicas.drop()
        self.offloader.drop()
        for stage in self.stages.values():
            stage.buffers.clear()
            stage.gradients.start({})

    def losses(self) -> torch.Tensor:
        """The losses of the last step, one per microbatch in order, [microbatches]; on every rank."""
        stage, meta = len(self.program.stages) - 1, self.program.loss
        assert meta is not None, "evaluation without a target has no loss"
        local = self.stages.get(stage)
        if local is not None:
            losses = torch.stack([local.buffers.losses.pop(index) for index in range(self.schedule.microbatches)])
        else:
            losses = torch.empty(self.schedule.microbatches, dtype=meta.dtype, device=self.place.device)
        if self.place.ranks > 1:
            dist.broadcast(losses, group=self.place.group, group_src=self.schedule.rank_of_stage[stage])
        return losses

    def metrics(self) -> dict[str, torch.Tensor]:
        """The metrics of the last step by name, one per microbatch in order, [microbatches]; on every rank."""
        stage, dtypes = len(self.program.stages) - 1, self.program.metrics
        if not dtypes:
            return {}
        local = self.stages.get(stage)
        table = torch.zeros(self.schedule.microbatches, len(dtypes), dtype=torch.float64, device=self.place.device)
        for index, row in enumerate(table if local is not None else ()):
            row.copy_(torch.stack([local.buffers.metrics[index][name].double() for name in dtypes]))  # type: ignore[union-attr]
        if self.place.ranks > 1:
            dist.broadcast(table, group=self.place.group, group_src=self.schedule.rank_of_stage[stage])
        return {name: column.to(dtype) for (name, dtype), column in zip(dtypes.items(), table.unbind(1), strict=True)}

    def take_outputs(self) -> list[dict[int, torch.Tensor]] | None:
        """Hand over the tensor leaves of each microbatch's output, by leaf index, on the last stage's rank; None elsewhere."""
        last = self.stages.get(len(self.program.stages) - 1)
        if last is None:
            return None
        return [last.buffers.outputs.pop(index, {}) for index in range(self.schedule.microbatches)]

    def _begin(self, inputs: StepInputs) -> None:
        self._reduced.clear()
        tensors = self._reader()
        self._tensors.update(zip(self._reader.fqns, tensors, strict=True))
        detached = dict(zip(self._reader.fqns, [tensor.detach() for tensor in tensors], strict=True))
        for stage in self.stages.values():
            stage.begin(detached.__getitem__, inputs)
            parameters = {fqn: self._tensors[fqn] for fqn in stage.gradients.fqns}
            grads = {fqn: parameter.grad for fqn, parameter in parameters.items() if fqn not in self.tied.contributors}
            dtypes = {fqn: dtype_of_sum(parameter, self._sum_dtype) for fqn, parameter in parameters.items()}
            stage.gradients.start({fqn: grad for fqn, grad in grads.items() if grad is not None}, dtypes)

    def _finish(self) -> None:
        """Put the gradients into `param.grad`: partial sums of tied parameters added up, then averaged over the replicas."""
        if not self.training:
            return
        for index in self.stages:
            self._average(index)
        tied = self.tied.reduce(lambda stage, fqn: self.stages[stage].gradients.sums[fqn], self._buffer_for_sum)
        self._replicas.start(tied.values())
        self._replicas.finish()
        for stage in self.stages.values():
            for fqn in self._own(stage):
                parameter, total = self._tensors[fqn], stage.gradients.sums[fqn]
                wanted = parameter.grad_dtype
                parameter.grad = total if wanted is None or total.dtype is wanted else total.to(dtype=wanted)
        for fqn, total in tied.items():
            parameter = self.state.tensor(fqn)
            added = total.to(dtype=parameter.grad_dtype) if parameter.grad is None else parameter.grad.add_(total)
            parameter.grad = added
        trained = {fqn: self._tensors[fqn] for stage in self.stages.values() for fqn in stage.gradients.fqns}
        self.hooked = with_gradient_hooks(trained)
        for stage in self.stages.values():
            stage.gradients.start({})

    def _own(self, stage: GraphStage) -> list[str]:
        """FQNs of the gradients that no other stage contributes to."""
        return [fqn for fqn in stage.gradients.sums if fqn not in self.tied.contributors]

    def _average(self, index: int) -> None:
        """Start to average a stage's gradients over the replicas, once per step."""
        if index not in self._reduced:
            self._reduced.add(index)
            stage = self.stages[index]
            self._replicas.start(stage.gradients.sums[fqn] for fqn in self._own(stage))

    def _buffer_for_sum(self, fqn: str) -> torch.Tensor:
        """New memory for another rank's partial sum of a parameter's gradients."""
        parameter = self.state.tensor(fqn)
        dtype = dtype_of_sum(parameter, self._sum_dtype)
        return torch.empty(parameter.shape, dtype=dtype, device=self.place.device)

    # ------------------------------------------------------------------------------ binding actions

    def _bound_loop(self) -> ActionLoop:
        from graphpp.runtime.action_loop import (
            ActionLoop,  # imports Dynamo: a second that `import graphpp` must not cost
        )

        row = [action for action in self.schedule.table[self.place.rank] if action is not None]
        if self.place.device.type == "cpu":  # on NCCL an early receive would block later sends to the same rank
            row = hoist_receives(row, self.schedule.rank_of_stage, DEPTH)
        return ActionLoop(list(self.stages.values()), self.schedule, [(action, self._bound(action)) for action in row])

    def _bound(self, action: Action) -> ActionFunction:
        """The function that does an action, with everything resolved that is known before the step."""
        if action.kind is Kind.OVERLAP_F_B:
            return self._offloading(action, partial(self._overlap, list(map(self._task, action.parts))))
        if action.is_compute:
            return self._offloading(action, self._task(action).run)
        if action.is_communication:
            return partial(self._communicate, [self._message(leaf) for leaf in action.leaves])
        return partial(self._average, action.stage) if action.kind is Kind.REDUCE_GRAD else _nothing

    def _task(self, action: Action) -> Task:
        phase = Phase(action.kind.value) if self.training else Phase.EVALUATE
        makers = upstream(action, self.schedule.stages)
        neighbour = self.stages.get(makers[0].stage) if makers else None
        return self.stages[action.stage].task(phase, _microbatch(action), neighbour)

    def _offloading(self, action: Action, compute: ActionFunction) -> ActionFunction:
        """A computation, with the evictions and prefetches of saved values around it."""

        def run() -> None:
            self.offloader.before(action)
            compute()
            self.offloader.after(action)

        return run

    def _overlap(self, parts: Sequence[Task]) -> None:
        if not self.overlaps.run(parts):
            for part in parts:
                part.run()

    def _message(self, action: Action) -> Callable[[], PendingMessage]:
        """A function that makes the message of a send or receive, not posted yet."""
        stage, direction = self.stages[action.stage], "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
        bind = stage.send_message if action.kind in SENDS else stage.receive_message
        return bind(direction, _microbatch(action))

    def _communicate(self, messages: Sequence[Callable[[], PendingMessage]]) -> None:
        self.transport.start([make() for make in messages])


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} names no microbatch"
    return action.microbatch


def _current(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A context with the device as CUDA's current one; the caller may have set another, for another pipeline."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _nothing() -> None:
    """UNSHARD and RESHARD do nothing: parameters are whole on their rank."""


def _contributors(program: PipelineProgram) -> dict[str, list[int]]:
    """For each trained parameter, the stages that contribute to its gradient, ascending."""
    stages: dict[str, list[int]] = {}
    for stage in program.stages:
        for fqn in stage.gradients:
            stages.setdefault(fqn, []).append(stage.index)
    return stages


def ranks_of_parameters(program: PipelineProgram, rank_of_stage: Mapping[int, int]) -> dict[str, list[int]]:
    """For each parameter, the ranks that hold it, ascending; the first one counts its norm."""
    found: dict[str, set[int]] = {}
    for stage in program.stages:
        for fqn in stage.parameters:
            found.setdefault(fqn, set()).add(rank_of_stage[stage.index])
    return {fqn: sorted(ranks) for fqn, ranks in found.items()}
