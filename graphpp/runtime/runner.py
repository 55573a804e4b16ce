"""GraphPPRunner: runs stage programs under torch's pipeline runtime, over one table of actions.

- The schedule is a table with communication that the checker has accepted. One process with all stages runs the same code,
  without sends and receives.
- The constructor binds each action of this rank's row to its function; a step calls these functions in order.
- After `step`, every rank can read the losses of all microbatches, and `param.grad` has the gradients, accumulated in
  microbatch order.
- When a step has returned or raised, the caller may write to its inputs, unless a note on the error says that the device still
  reads them. After a step that failed, the runner keeps no value of it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from graphpp._torch.autograd import finds_nan, profiled, with_gradient_hooks
from graphpp._torch.parallel.sharded_tensor import are_plain
from graphpp.parallel import ordered_sums
from graphpp.parallel.data_parallel import Replicas
from graphpp.parallel.rank_place import RankPlace, SpreadExperts
from graphpp.parallel.sums import Sums
from graphpp.runtime.bind_actions import ActionBinder
from graphpp.runtime.dtensors import is_expert, value_of
from graphpp.runtime.fsdp.sharded_gradients import LayerGradients, LayerReducer, ShardedGradients
from graphpp.runtime.fsdp.sharded_parameters import ShardedParameters
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel
from graphpp.runtime.gradients.tied import PartialSums, TiedReduction
from graphpp.runtime.gradients.whole_gradients import WholeGradients
from graphpp.runtime.messages.mailbox import Mailbox
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.offloader import CudaMover, Offloader
from graphpp.runtime.parameter_rows import any_rows, ranks_of_parameters, whole_name
from graphpp.runtime.program import Phase, PipelineProgram, WovenProgram
from graphpp.runtime.random_keys import step_keys
from graphpp.runtime.recorder import WaitRecorder
from graphpp.runtime.stage import GraphStage, Variant
from graphpp.runtime.task import OverlappedActions, StepInputs
from graphpp.runtime.whole_step import StepGraphs, WholeStep
from graphpp.schedules.table.actions import SENDS, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule
from graphpp.streams import as_current, finish_copies_after

if TYPE_CHECKING:
    from graphpp.runtime.action_loop import ActionLoop, ActionWatcher


@dataclass(frozen=True)
class RunnerConfig:
    """The optional parts of a runner; the defaults suit one process.

    `owners`: the ranks with each parameter, by FQN (None: the ranks of the stages that use it). `sum_dtype`: the dtype for
    sums of narrower gradients. `replicas`: the ranks among which gradients are averaged; `experts`: where experts are spread
    (None: nowhere, or no averages). `kernel` multiplies the gradients of fused programs (None: torch does). `woven`: the
    programs of overlapped actions. `offload`: when saved values are in the host's memory; `mover` copies them (None: they
    stay). `sharded`: the rank's sharded parameters (None: whole ones). `sums` adds gradients over ranks. `graphs` records and
    replays the tasks (None: they run). `slow_after`: as for `Mailbox`.
    """

    owners: Mapping[str, Sequence[int]] | None = None
    sum_dtype: torch.dtype | None = None
    replicas: dist.ProcessGroup | None = None
    experts: SpreadExperts | None = None
    kernel: MatmulKernel | None = None
    woven: Sequence[WovenProgram] = ()
    offload: Sequence[OffloadWindow] = ()
    mover: CudaMover | None = None
    sharded: ShardedParameters | None = None
    sums: Sums = ordered_sums
    graphs: StepGraphs | None = None
    slow_after: float | None = None


class GraphPPRunner:
    """Runs captured graphs under one schedule; `training` programs have F and B, evaluation programs E.

    `programs`: one for all microbatches, or one for each. All have the same stages, gradients and metrics.
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
        self.schedule, self.state, self.place = schedule, state, place
        each = [programs] * schedule.microbatches if isinstance(programs, PipelineProgram) else list(programs)
        self.program, self.programs = each[0], tuple(each)
        self.random = any(program.random for program in {id(program): program for program in each}.values())
        batched = any(action.kind is Kind.P2P for _, _, action in schedule.cells())
        self.mailbox = Mailbox(place.group, place.device, batched=batched, slow_after=config.slow_after)
        self._sharded = config.sharded
        layers = self._sharded if self.program.gathers_layers else None
        self._reducer = LayerReducer(layers, config.sum_dtype, config.sums) if layers is not None else None
        self._graphs = config.graphs
        # Of several ranks each has one part of a parameter whose rows are cut: this rank's parameter.
        self._name: Callable[[str], str] = str if place.ranks == 1 else whole_name
        self.stages = self._local_stages(each, config.kernel)
        self.training = Phase.FORWARD in self.program.stages[0].programs
        self._bubble = 0.0
        read = frozenset[str]().union(*(stage.reads.union(stage.gradients.fqns) for stage in self.stages.values()))
        self._reader, self._tensors = state.reader(sorted(read)), dict[str, torch.Tensor]()
        self._reads_rows = any_rows(read)
        self.hooked: frozenset[str] = frozenset()  # FQNs of this rank's parameters with hooks on gradients, in the last step
        shards_of = self._sharded.shards_of if self._sharded is not None and self._reducer is None else None
        self._shards = {at: shards_of(each.reads) for at, each in self.stages.items()} if shards_of is not None else {}
        owners = config.owners if config.owners is not None else ranks_of_parameters(self.program, schedule.rank_of_stage)
        ranks = {self._name(fqn) if place.rank in each else fqn: each for fqn, each in owners.items()}
        contributors: dict[str, list[int]] = {}  # for each trained parameter the stages that make a part of its gradient
        for stage in self.program.stages:
            for fqn in stage.gradients:
                contributors.setdefault(self._name(fqn) if stage.index in self.stages else fqn, []).append(stage.index)
        tied = TiedReduction(contributors, ranks, schedule.rank_of_stage, place.group)
        self._gradients = self._gradients_of_step(tied, config)
        self.overlaps = OverlappedActions(config.woven)
        self.offloader = Offloader(config.offload, self.stages, config.mover)
        others = config.replicas, config.experts, config.sharded
        here = place.ranks == 1 and all(each is None for each in others) and not self.program.partial
        numbers = any(stage.reads_numbers for stage in self.stages.values())
        # Whether a step exchanges values with no other rank, with no other stream and not with the host.
        self._alone = here and not (config.woven or self.offloader.evicts or self.random or numbers)
        self._recorder: WaitRecorder | None = None
        self._loop = self._bound_loop() if self.stages else None  # a rank without a stage runs no actions

    def _local_stages(self, each: Sequence[PipelineProgram], kernel: MatmulKernel | None) -> dict[int, GraphStage]:
        local: dict[int, GraphStage] = {}
        for index in (index for index, rank in sorted(self.schedule.rank_of_stage.items()) if rank == self.place.rank):
            distinct = {id(program.stages[index]): program for program in each}
            variants = {key: Variant.of(program, index, self._name) for key, program in distinct.items()}
            own = [variants[id(program.stages[index])] for program in each]
            local[index] = GraphStage(index, own, self.schedule, self.place, self.mailbox, kernel, self._reducer, self._graphs)
        return local

    def _gradients_of_step(self, tied: TiedReduction, config: RunnerConfig) -> WholeGradients | ShardedGradients:
        stages, sum_dtype = {index: stage.gradients for index, stage in self.stages.items()}, config.sum_dtype
        partial = PartialSums(self.program.partial, self.place.tp_group)
        if config.sharded is None:
            names = {fqn for stage in stages.values() for fqn in stage.fqns} if config.experts is not None else ()
            experts = [fqn for fqn in names if is_expert(self.state.tensor(fqn), self.place)]
            replicas = Replicas(config.replicas, config.sums, config.experts)
            return WholeGradients(stages, tied, replicas, self.state.tensor, sum_dtype, experts, partial)
        number = 1 if config.replicas is None else dist.get_world_size(config.replicas)
        parts = stages, tied, config.sharded, number, sum_dtype, config.sums, partial
        return ShardedGradients(*parts) if self._reducer is None else LayerGradients(self._reducer, *parts)

    def step(
        self,
        inputs: Sequence[Mapping[str, torch.Tensor]],
        seeds: Sequence[torch.Tensor],
        silent: frozenset[int] = frozenset(),
    ) -> None:
        """Run the table once. Raises `PeerLost` if a rank is lost.

        `inputs`: each microbatch's tensors by path; `seeds`: each microbatch's gradient of the loss, 0-dim. `silent`: the
        microbatches whose gradients do not count.
        """
        self.mailbox.waited, began = 0.0, time.perf_counter()
        try:
            with torch.no_grad(), as_current(self.place.device):
                keys = step_keys(len(inputs), self.place.model_parallel, self.place.device) if self.random else ()
                with profiled("actions"):
                    self._run(StepInputs(inputs, seeds, keys, silent))
                    self.mailbox.flush()
                with profiled("gradients"):
                    self._finish()
            for stage in self.stages.values():
                stage.buffers.copies.finish()
            self._bubble = self.mailbox.waited / max(time.perf_counter() - began, 1e-9)
        except BaseException as error:
            self._drop()
            finish_copies_after(error, [stage.buffers.copies for stage in self.stages.values()])
            raise
        finally:
            self._tensors.clear()
            for stage in self.stages.values():
                stage.end()

    @contextlib.contextmanager
    def recording(self, recorder: WaitRecorder) -> Iterator[None]:
        """Record the times of a step that runs inside this context."""
        self._recorder, self.mailbox.on_wait = recorder, recorder.waiting
        try:
            yield
        finally:
            self._recorder = self.mailbox.on_wait = None

    @property
    def _watch(self) -> ActionWatcher | None:
        return None if self._recorder is None else self._recorder.run

    @cached_property
    def sent_bytes(self) -> int:
        """The bytes of the messages that this rank sends in a step."""
        leaves = [leaf for action in self.schedule.table[self.place.rank] if action is not None for leaf in action.leaves]
        return sum(self.stages[leaf.stage].message_bytes(leaf) for leaf in leaves if leaf.kind in SENDS)

    @property
    def bubble(self) -> float | None:
        """The fraction of the last step, 0 to 1, that this process waited for messages; None on CUDA."""
        return self._bubble if self.place.device.type == "cpu" else None

    @property
    def anomaly(self) -> str:
        """The first NaN of the last step's backward on this rank, if `torch.autograd.detect_anomaly` was on; else empty."""
        return "" if self._loop is None else self._loop.anomaly

    def _drop(self) -> None:
        self.mailbox.drop()
        self._gradients.drop()
        self.offloader.drop()
        for index, stage in self.stages.items():
            stage.buffers.clear()
            for flat in self._shards.get(index, ()):
                flat.drop()

    @property
    def _last(self) -> GraphStage | None:
        """The last stage, on its rank; None elsewhere."""
        return self.stages.get(len(self.program.stages) - 1)

    def losses(self) -> torch.Tensor:
        """The losses of the last step, one per microbatch in order, [microbatches]; on every rank."""
        meta, last = self.program.loss, self._last
        assert meta is not None, "evaluation without a target has no loss"
        if last is not None:
            losses = torch.stack([last.buffers.losses.pop(index) for index in range(self.schedule.microbatches)])
        else:
            losses = torch.empty(self.schedule.microbatches, dtype=meta.dtype, device=self.place.device)
        self.from_last_stage(losses)
        return losses

    def metrics(self) -> dict[str, torch.Tensor]:
        """The metrics of the last step by name, one per microbatch in order, [microbatches]; on every rank."""
        dtypes, last = self.program.metrics, self._last
        if not dtypes:
            return {}
        table = torch.zeros(self.schedule.microbatches, len(dtypes), dtype=torch.float64, device=self.place.device)
        for index, row in enumerate(table if last is not None else ()):
            row.copy_(torch.stack([last.buffers.metrics[index][name].double() for name in dtypes]))  # type: ignore[union-attr]
        self.from_last_stage(table)
        return {name: column.to(dtype) for (name, dtype), column in zip(dtypes.items(), table.unbind(1), strict=True)}

    def from_last_stage(self, values: torch.Tensor) -> None:
        """Broadcast `values` (contiguous, on the rank's device) from the rank of the last stage into the others' `values`."""
        if self.place.ranks > 1:
            self.mailbox.transport.broadcast(values, self.schedule.rank_of_stage[len(self.program.stages) - 1])

    def take_outputs(self) -> list[dict[int, torch.Tensor]] | None:
        """Remove and return each microbatch's output leaves, by leaf index, on the last stage's rank; None elsewhere."""
        if self._last is None:
            return None
        return [self._last.buffers.outputs.pop(index, {}) for index in range(self.schedule.microbatches)]

    def _run(self, inputs: StepInputs) -> None:
        """Run the row of actions, or replay it."""
        self._begin(inputs)
        if self._graphs is None:
            self._run_row()
            return
        whole = partial(WholeStep, self.stages, inputs, partial(self._begin, inputs), self._run_row)
        plain = self._alone and self._watch is None and not finds_nan() and not inputs.silent
        self._graphs.run_step(self._run_row, whole if plain else None)

    def _run_row(self) -> None:
        for stage in (stage for index, stage in self.stages.items() if index not in self._shards):
            stage.prepare()
        if self._loop is not None:
            self._loop.run(self._watch)

    def _begin(self, inputs: StepInputs) -> None:
        tensors = self._reader()
        self._tensors.update(zip(self._reader.fqns, tensors, strict=True))
        values = dict(zip(self._reader.fqns, self._values(tensors), strict=True))
        self._gradients.begin(self._tensors)
        for stage in self.stages.values():
            stage.begin(values.__getitem__, inputs)

    def _values(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._sharded is None and are_plain(tensors) and not self._reads_rows:
            return [tensor.detach() for tensor in tensors]
        return [self._value(fqn, tensor) for fqn, tensor in zip(self._reader.fqns, tensors, strict=True)]

    def _value(self, fqn: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._sharded is None or fqn not in self._sharded:
            return value_of(fqn, tensor)
        return self._sharded.whole(fqn) if self._reducer is None else self._sharded.gathered_by_programs(fqn)

    def _finish(self) -> None:
        if not self.training:
            return
        self._gradients.finish()
        trained = {fqn: self._tensors[fqn] for stage in self.stages.values() for fqn in stage.gradients.fqns}
        self.hooked = with_gradient_hooks(trained)

    def _bound_loop(self) -> ActionLoop:
        # It imports Dynamo: a second that `import graphpp` must not cost.
        from graphpp.runtime.action_loop import ActionLoop

        parts = self.schedule, self.stages, self.mailbox, self._gradients, self._shards, self.offloader, self.overlaps
        row = ActionBinder(*parts, training=self.training).row(self.place.rank)
        return ActionLoop(list(self.stages.values()), self.schedule, row)
