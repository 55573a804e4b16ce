"""The calls of a pipeline that every rank makes: agreed upon, prepared, run.

Contract: all ranks call every method, and each raises on all ranks or on none. Before anything runs, ranks compare the
pipeline, the number of the call on this pipeline, its kind and arguments, and checksums of the data that each rank was given.
After a call that failed midway on this rank, every later call here raises `GraphPPError`: the other ranks may still be in the
failed call, until its timeout.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from graphpp._torch.autograd import finds_nan
from graphpp.batch.loss_weights import NO_WEIGHTS, LossArguments, LossWeighting
from graphpp.compiler.request import CompileRequest
from graphpp.errors import GraphPPError
from graphpp.ownership.initial_values import InitialValues
from graphpp.parallel.agreement import Agreement, Round
from graphpp.parallel.data_parallel import average_, broadcast_
from graphpp.parallel.facts import Facts
from graphpp.parallel.groups import Timeouts, gloo_twin
from graphpp.parallel.lost_rank import FailureBoard
from graphpp.pipeline.cache_key import StepCall
from graphpp.pipeline.given_data import checksums, filled, holdings_of_ranks
from graphpp.pipeline.graph_cache import GraphCache, PreparedStep
from graphpp.pipeline.read_batch import Batch, BatchReader
from graphpp.pipeline.step_record import StepMeter
from graphpp.runtime.dtensors import local_tensor
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.recorder import WaitRecorder
from graphpp.streams import end_marker

NO_LINES: Mapping[str, Sequence[str]] = MappingProxyType({})
_LOCKS = weakref.WeakKeyDictionary[dist.ProcessGroup, Any]()  # of the ranks of a pipeline -> held by the thread in a call


class Calls:
    def __init__(
        self, request: CompileRequest, agreement: Agreement, cache: GraphCache, state: ModelState, reader: BatchReader
    ) -> None:
        place, options = request.place, request.options
        self._options, self._place, self._agreement, self._cache = options, place, agreement, cache
        self._state, self._reader = state, reader
        self._replicas, self._peers = place.agreement(place.replicas), place.agreement(place.cp_ep_group)
        self._initial = InitialValues(options, place, self._replicas, cache.ownership, state)
        self._name = agreement.shared_name()
        groups, mark = (place.model_parallel, place.replicas), end_marker(place.device)
        slow_after = options.parallel.slow_after
        self._board = FailureBoard(groups, self._name, place.described, mark, place.group, slow_after)
        self._every = options.parallel.check_data if agreement.several else 0
        self._timeouts = Timeouts(options.parallel.timeout, options.parallel.start_timeout)
        lock, everyone = threading.RLock(), place.everyone
        self._lock = lock if everyone is None else _LOCKS.setdefault(everyone.groups[0], lock)
        self._number = 0
        self._data_calls = {True: 0, False: 0}  # training calls and evaluations
        # Whether evaluations too exchange values with replicas.
        self._meets_replicas = place.sharding is not None or place.experts is not None
        self._broken = False
        self.last: PreparedStep | None = None
        self.bytes_of_all = agreement.bytes_of_all
        self.steps = 0  # training calls that have ended
        self.meter = StepMeter(place.device)
        self.saving: str | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context around a call of all ranks: if one rank fails, the others raise `RankFailure`.

        Raises `GraphPPError`, changing nothing, while another thread is in a call over the same ranks.
        Inference mode is off inside, so the caller's inference mode makes no inference tensors here.
        """
        if not self._lock.acquire(blocking=False):
            raise GraphPPError(
                "another thread is in a call of this pipeline, or of one over the same process group: make their calls one "
                "after another, in the same order on all ranks, or give each thread's pipeline a mesh= of its own"
            )
        try:
            self._number += 1
            with self._timeouts.stepping(), self._board.watching(), torch.inference_mode(False):
                yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def exchanging(self, training: bool = True) -> Iterator[None]:
        """A context around messages and collectives after an agreement: if one of them fails, later calls are refused."""
        meets_replicas = training or self._meets_replicas
        self._broken = self._agreement.several or (meets_replicas and self._replicas.several)
        yield
        self._broken = False

    @contextlib.contextmanager
    def all_ranks(self, what: str, alike: Mapping[str, Sequence[str]] = NO_LINES) -> Iterator[dict[str, Sequence[str]]]:
        """A context around work of every rank of the pipeline: if the work fails on one rank, all ranks raise.

        `alike`: lines that must be equal on all ranks at the end; the body may add lines. The timeout is `start_timeout`,
        because files and values take longer than a step.
        """
        with self.watched(), self._timeouts.starting(), self.agreeing(what, alike) as lines:
            yield lines

    @contextlib.contextmanager
    def agreeing(self, what: str, alike: Mapping[str, Sequence[str]] = NO_LINES) -> Iterator[dict[str, Sequence[str]]]:
        """As `all_ranks`, inside `watched` and with the timeout of a step."""
        self.check_whole()
        lines = dict(alike)
        with Round(self._agreement) as r:
            r.compare(self._described(Facts(lines), what))
            yield lines

    @contextlib.contextmanager
    def all_replicas(self, what: str) -> Iterator[None]:
        """A context around work of every replica: if the work fails on one rank, all ranks of all replicas raise."""
        with self.watched(), self._timeouts.starting(), Round(self._replicas) as r:
            r.compare(Facts({"the call": [what]}))
            yield

    def exchanged(self, make: Callable[[], bytes]) -> list[bytes]:
        """The bytes that `make` returns on each rank of the pipeline, in order; raises on all ranks if it raises on one."""
        with self.watched():
            self.check_whole()
            return self.bytes_of_all(make)

    def check_whole(self) -> None:
        if self._broken:
            raise GraphPPError(
                "an earlier call of this pipeline ended midway, and messages between the ranks may still be under way: "
                "restart all ranks from the last checkpoint."
            )

    def prepare(
        self, batch: Batch, weights: LossArguments = NO_WEIGHTS, *, training: bool = True, asked: str = "step"
    ) -> tuple[StepCall, PreparedStep]:
        """The call and its runner. If the call exchanges values with replicas, all replicas prepare it or all raise.

        `asked`: the name of the call. A new call has the timeout `start_timeout` until all replicas are prepared.
        """
        self.check_whole()
        asked += " under torch.autograd.detect_anomaly" * finds_nan()
        meeting = [self._replicas] if training or self._meets_replicas else []
        with contextlib.ExitStack() as starting, Round(*meeting) as r:
            call, lacking = self._agree(batch, weights, training=training, asked=asked)
            if not self._cache.has(call):
                starting.enter_context(self._timeouts.starting())
            call, prepared = self._cache.prepare(call)
            if lacking:
                call = self._with_data(call, prepared)
            if training:
                self._initial.compare_shared_layers(self._agreement)
            r.compare(self._facts_of_replica(prepared, asked, self._initial.of_replica() if training else NO_LINES))
        if training and self._initial.sends:
            with self.exchanging():
                self._initial.send()
        if training:
            self._initial.finish(self._agreement)
        return call, prepared

    def compile(self, batch: Batch, microbatches: int | None = None) -> None:
        """Capture and plan a training call. `microbatches`: their number if the batch is one example of them."""
        with self._timeouts.starting():
            call, _ = self._agree(batch, NO_WEIGHTS, training=True, asked="compile")
            self._cache.compile(call, microbatches or len(call.parts))

    def run(self, call: StepCall, prepared: PreparedStep, recorder: WaitRecorder | None = None) -> PreparedStep:
        place = self._place
        loss = prepared.runner.program.loss
        seeds = call.weighting.seeds(len(call.parts), loss.dtype, place.device) if loss is not None else []
        with self.exchanging(call.training):
            recording = contextlib.nullcontext() if recorder is None else prepared.runner.recording(recorder)
            with torch.autocast(place.device.type, enabled=False), recording:  # casts of autocast are in the graph
                prepared.runner.step(prepared.inputs(call.parts), seeds, call.weighting.silent)
            if call.training:
                self._share_buffers(prepared)
        if finds_nan():
            with Round(self._agreement, *[self._replicas] * call.training):
                if anomaly := prepared.runner.anomaly:
                    remedy = "graphpp.verify names the first value with NaN, of the forward too"
                    raise GraphPPError(f"torch.autograd.detect_anomaly: {anomaly}. {remedy}")
        self._cache.after_step(call, prepared)
        self.last = prepared
        return prepared

    def _agree(self, batch: Batch, weights: LossArguments, *, training: bool, asked: str) -> tuple[StepCall, bool]:
        """The call, whose microbatches, data, weights and scale ranks have compared, and whether a rank has absent data."""
        self.check_whole()
        with Round(self._agreement, self._peers) as r:
            self._data_calls[training] += 1  # first, so that ranks count alike if one of them fails below
            if training:
                self.meter.begin(self.steps + 1)  # an error of a hook is raised on all ranks
            parts = self._reader.microbatches(batch, training=training)
            weighting = LossWeighting.of(self._options.gradients.reduction, weights, [part.rows for part in parts])
            call = self._cache.call(parts, weighting, training=training)
            of_pipeline, of_peers = self._cache.facts(call)
            sums = checksums(parts, self._data_calls[training], self._every)
            numbers = [f"{path}: {part.tensors[path].item()}" for part in call.parts for path in sorted(part.numbers)]
            lines = {"the weights of the loss": weighting.description, "the numbers of the microbatches": numbers}
            r.compare(self._described(of_pipeline, asked, lines, sums), of_peers)
        return call, r.lacking

    def _with_data(self, call: StepCall, prepared: PreparedStep) -> StepCall:
        """The call with all data that this rank reads, received from other ranks where absent here."""
        number = self._data_calls[call.training]
        holdings = holdings_of_ranks(call.parts, prepared.reads(), number, self._every, self._agreement)
        with self.exchanging():
            return replace(call, parts=filled(call.parts, holdings, self._agreement))

    def _facts_of_replica(self, prepared: PreparedStep, asked: str, values: Mapping[str, Sequence[str]]) -> Facts:
        sharded = self._cache.ownership.sharded
        layout = {} if sharded is None else {"the shards of the parameters": sharded.layout}
        return prepared.lowered.replica_facts.adding({"the call": [asked], **layout, **values})

    def _described(
        self,
        known: Facts,
        call: str,
        more: Mapping[str, Sequence[str]] = NO_LINES,
        sums: Mapping[str, int | None] = MappingProxyType({}),
    ) -> Facts:
        number = f"call {self._number} of the pipeline {self._name}"
        return known.adding({**more, "the call": [call], "the number of the call": [number]}, sums)

    def _share_buffers(self, prepared: PreparedStep) -> None:
        """Broadcast or average over the replicas the buffers that the forward wrote, as `replica_buffers` says."""
        how, replicas = self._options.parallel.replica_buffers, self._place.replicas
        if how == "own" or replicas is None:
            return
        stages = [stage for program in prepared.runner.programs for stage in program.stages]
        own = {fqn for stage in stages if stage.index in prepared.runner.stages for fqn in stage.written_buffers}
        experts, share = self._cache.ownership.experts, broadcast_ if how == "broadcast" else average_
        same_experts = None if self._place.experts is None else self._place.experts.replicas
        for group, fqns in ((replicas, own - experts), (same_experts, own & experts)):
            if group is not None:
                share([local_tensor(self._state.tensor(fqn)) for fqn in sorted(fqns)], group)

    @cached_property
    def file_group(self) -> dist.ProcessGroup | None:
        """The ranks of one copy of the model, as a separate group for checkpoints, which are written while steps run."""
        return self._twin(self._place.whole_model)

    @cached_property
    def file_group_of_all(self) -> dist.ProcessGroup | None:
        return self._twin(() if self._place.everyone is None else self._place.everyone.ranks)

    def _twin(self, ranks: Sequence[int]) -> dist.ProcessGroup | None:
        everyone = self._place.everyone
        return None if everyone is None else gloo_twin(ranks, everyone.groups[0], self._options.parallel.start_timeout)
