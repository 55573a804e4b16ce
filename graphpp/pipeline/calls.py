"""The calls of a pipeline that every rank makes: agreed upon, prepared, run.

Contract
--------
- Every method is called by all ranks, and does the same on all ranks, or raises on all ranks.
- A call has a number, which counts the calls of this pipeline on this rank. Before anything runs, ranks compare the pipeline,
  the number, the kind and the arguments of a call, and checksums of the data that they were given.
- After a call that ended midway on this rank every later call raises `GraphPPError` here: the other ranks may still be in that
  call, and learn of it by the timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from graphpp.batch.cut_batch import leading_size
from graphpp.batch.loss_weights import NO_WEIGHTS, LossArguments, LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.errors import GraphPPError
from graphpp.options.options import Options
from graphpp.ownership.initial_values import InitialValues
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.data_parallel import average_, broadcast_
from graphpp.parallel.facts import Facts
from graphpp.parallel.groups import Timeouts, gloo_twin
from graphpp.parallel.lost_rank import FailureBoard
from graphpp.parallel.rank_place import RankPlace
from graphpp.pipeline.given_data import checksums, filled, holdings_of_ranks
from graphpp.pipeline.grad_norm import RankGradients
from graphpp.pipeline.graph_cache import GraphCache, PreparedStep
from graphpp.pipeline.step_call import StepCall
from graphpp.runtime.dtensors import local_tensor
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.recorder import Recorder

T = TypeVar("T")
NO_LINES: Mapping[str, Sequence[str]] = MappingProxyType({})
MakeParts = Callable[[], list[FlatMicrobatch]]


class Calls:
    """The calls of one pipeline on this rank."""

    def __init__(
        self, options: Options, place: RankPlace, agreement: Agreement, cache: GraphCache, state: ModelState
    ) -> None:
        self._options, self._place, self._agreement, self._cache, self._state = options, place, agreement, cache, state
        self._replicas, self._peers = place.agreement(place.replicas), place.agreement(place.cp_ep_group)
        self._initial = InitialValues(options, place, self._replicas, cache.ownership, state)
        self._name = agreement.shared_name()
        self._board = FailureBoard((place.model_parallel, place.replicas), self._name, place.described)
        self._every = options.parallel.check_data if agreement.several else 0
        parallel = options.parallel
        self._timeouts = Timeouts(place.groups, parallel.timeout, parallel.start_timeout)
        self._number = 0
        self._data_calls = {True: 0, False: 0}  # training calls and evaluations
        self._codes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of gradients: this rank's own, and all ranks'
        self._latest_seeds: tuple[tuple[LossWeighting, int, torch.dtype], Sequence[torch.Tensor]] | None = None
        self._broken = False
        self.last: PreparedStep | None = None
        self.steps = 0  # training calls that have ended
        self.saving: str | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context around a call of all ranks: if one rank fails, the others raise `RankFailure`.

        Tensors made in it are no inference tensors, also where the caller is in inference mode.
        """
        self._number += 1
        with self._board.watching(), torch.inference_mode(False):
            yield

    def agreed(self, call: str, read: Callable[[], tuple[T, RankGradients]]) -> tuple[T, RankGradients]:
        """The arguments of a call, and the gradients with the codes of all ranks, if all ranks make this call.

        `read` reads this rank's arguments and gradients. Ranks exchange codes only if a rank's own have changed since the call
        before. Raises the error of this rank's `read`, and `MismatchError` where another rank failed or differs.
        """

        def facts_of(made: tuple[T, RankGradients]) -> Facts:
            known = self._codes is not None and self._codes[0] == made[1].own_codes
            facts_of_call = self._described(Facts({"its arguments": [str(made[0])]}), call)
            return facts_of_call.with_sums({"the dtypes of gradients": 0 if known else None})

        self.check_whole()
        (arguments, own), changed = self._agreement.together_or_lacking(read, facts_of)
        if changed or self._codes is None:
            self._codes = own.own_codes, tuple(self._agreement.largest(own.own_codes))
        return arguments, replace(own, codes=self._codes[1])

    @contextlib.contextmanager
    def exchanging(self, training: bool = True) -> Iterator[None]:
        """A context around messages and collectives after an agreement: if one fails, later calls are refused."""
        meets_replicas = training or self._meets_replicas
        self._broken = self._agreement.several or (meets_replicas and self._replicas.several)
        yield
        self._broken = False

    def evaluation(self, make: MakeParts, weights: LossArguments) -> tuple[StepCall, PreparedStep]:
        """Prepare an evaluation: on all replicas or on none, where they hold shards of the parameters, or other experts."""

        def prepare() -> tuple[StepCall, PreparedStep]:
            call, lacking = self._agreed(make, weights, training=False)
            return self._prepared(call, lacking, stack)

        with contextlib.ExitStack() as stack:
            if not self._meets_replicas:
                return prepare()
            return self._replicas.together(prepare, lambda made: self._of_replica(made[1], "eval"))

    def training(
        self, make: MakeParts, weights: LossArguments = NO_WEIGHTS, asked: str = "step"
    ) -> tuple[StepCall, PreparedStep]:
        """Prepare a training call, on all replicas or on none, because each replica waits for the gradients of the others.

        `make` makes this rank's microbatches. `asked`: the name of the call.
        """

        def prepare() -> tuple[StepCall, PreparedStep]:
            call, lacking = self._agreed(make, weights, training=True, asked=asked)
            made = self._prepared(call, lacking, stack)
            self._initial.compare_shared_layers(self._agreement)
            return made

        def facts_of(made: tuple[StepCall, PreparedStep]) -> Facts:
            known, values = self._of_replica(made[1], asked), self._initial.of_replica()
            return known.joined(values) if values.lines else known

        self.check_whole()
        with contextlib.ExitStack() as stack:  # a replica that compiles faster waits for the others
            made = self._replicas.together(prepare, facts_of)
        if self._initial.sends:
            with self.exchanging():
                self._initial.send()
        self._initial.finish(self._agreement)
        return made

    @property
    def _meets_replicas(self) -> bool:
        """Whether this rank exchanges values with replicas in every call, also in an evaluation."""
        return self._place.sharding is not None or self._place.experts is not None

    def compile(self, make: MakeParts, microbatches: int) -> None:
        """Compile the graphs of a training call, for a table of so many microbatches, and run nothing."""
        with self._timeouts.starting():
            call, _ = self._agreed(make, NO_WEIGHTS, training=True, asked="compile")
            self._cache.compile(call, microbatches)

    def run(self, call: StepCall, prepared: PreparedStep, recorder: Recorder | None = None) -> PreparedStep:
        """Run a call once, recorded if so asked; afterwards the runner has the results."""
        place = self._place
        loss = prepared.runner.program.loss
        seeds = self._seeds(call.weighting, len(call.parts), loss.dtype) if loss is not None else []
        with self.exchanging(call.training):
            recording = contextlib.nullcontext() if recorder is None else prepared.runner.recording(recorder)
            with _without_autocast(place.device.type), recording:  # casts of autocast are in the graph
                prepared.runner.step(prepared.inputs(call.parts), seeds)
            if call.training:
                self._share_buffers(prepared)
        self._cache.after_step(call, prepared)
        self.last = prepared
        return prepared

    def _seeds(self, weighting: LossWeighting, count: int, dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """The seeds of a call's microbatches: those of the call before where they are equal, for no program writes into one."""
        if weighting.scaler is not None:
            return weighting.seeds(count, dtype, self._place.device)
        of_call = weighting, count, dtype
        if self._latest_seeds is None or self._latest_seeds[0] != of_call:
            self._latest_seeds = of_call, weighting.seeds(count, dtype, self._place.device)
        return self._latest_seeds[1]

    def _share_buffers(self, prepared: PreparedStep) -> None:
        """Make the buffers that the forward wrote equal on all replicas, if so asked."""
        how, replicas = self._options.parallel.replica_buffers, self._place.replicas
        if how != "own" and replicas is not None:
            stages = [stage for program in prepared.runner.programs for stage in program.stages]
            own = {fqn for stage in stages if stage.index in prepared.runner.stages for fqn in stage.written_buffers}
            experts, share = self._cache.ownership.experts, broadcast_ if how == "broadcast" else average_
            share([local_tensor(self._state.tensor(fqn)) for fqn in sorted(own - experts)], replicas)
            if self._place.experts is not None and self._place.experts.replicas is not None:
                tensors = [local_tensor(self._state.tensor(fqn)) for fqn in sorted(own & experts)]
                share(tensors, self._place.experts.replicas)

    @cached_property
    def file_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that hold the model once, for checkpoints, which are written while steps go on."""
        return gloo_twin(self._place.whole_model, self._options.parallel.start_timeout)

    @cached_property
    def file_group_of_all(self) -> dist.ProcessGroup | None:
        """The process group of all ranks of all replicas, for checkpoints."""
        return gloo_twin(self._place.everyone, self._options.parallel.start_timeout)

    def all_do(self, what: str, work: Callable[[], T], alike: Callable[[], Mapping[str, list[str]]] | None = None) -> T:
        """Do `work` on every rank of the pipeline, and go on when all have done it. Raises on all ranks if it fails on one.

        `alike` gives lines that all ranks must have alike. The timeout is that of the start, for files and values take longer
        than a step.
        """
        self.check_whole()
        with self.watched(), self._timeouts.starting():
            return self._agreement.together(work, lambda _: self._described(Facts(dict(alike() if alike else {})), what))

    def replicas_do(self, what: str, work: Callable[[], T]) -> T:
        """Do `work` on every replica, and go on when all have done it. Raises on all replicas if it fails on one."""
        with self.watched(), self._timeouts.starting():
            return self._replicas.together(work, lambda _: Facts({"the call": [what]}))

    def check_whole(self) -> None:
        """Raise `GraphPPError` after a call that ended midway."""
        if self._broken:
            raise GraphPPError(
                "an earlier call of this pipeline ended midway, and messages between the ranks may still be under way: "
                "restart all ranks from the last checkpoint."
            )

    # ------------------------------------------------------------------------------------------------ inside

    def _agreed(
        self, make: MakeParts, weights: LossArguments, *, training: bool, asked: str = ""
    ) -> tuple[StepCall, bool]:
        """A call for which all ranks have as many microbatches, of the same shapes and data, weights and scale.

        Also whether a rank lacks data.
        """

        def make_call() -> StepCall:
            parts = make()
            weighting = LossWeighting.of(self._options.gradients.reduction, weights, [leading_size(part) for part in parts])
            return self._cache.call(parts, weighting, training=training)

        def facts_of(made: StepCall) -> Facts:
            weights = {"the weights of the loss": made.weighting.description}
            known = self._described(self._cache.facts(made), asked, weights)
            self._data_calls[training] += 1
            return known.with_sums(checksums(made.parts, self._data_calls[training], self._every))

        def agreed() -> tuple[StepCall, bool]:
            return self._agreement.together_or_lacking(make_call, facts_of)

        self.check_whole()
        if not self._peers.several:
            return agreed()
        return self._peers.together(agreed, lambda made: self._cache.facts_of_peers(made[0]))

    def _prepared(
        self, call: StepCall, lacking: bool, stack: contextlib.ExitStack
    ) -> tuple[StepCall, PreparedStep]:
        """The call with its runner and the data that this rank reads.

        A new call is compiled under the timeout of the start, which holds until `stack` ends.
        """
        if not self._cache.has(call):
            stack.enter_context(self._timeouts.starting())
        prepared = self._cache.prepared(call)
        if not lacking:
            return call, prepared
        number = self._data_calls[call.training]
        holdings = holdings_of_ranks(call.parts, prepared.reads(), number, self._every, self._agreement)
        with self.exchanging():
            parts = filled(call.parts, holdings, self._agreement)
        return replace(call, parts=parts), prepared

    def _of_replica(self, prepared: PreparedStep, asked: str) -> Facts:
        """The lines that all replicas must have alike: about their stages, their shards, and the call."""
        sharded = self._cache.ownership.sharded
        layout = {} if sharded is None else {"the shards of the parameters": sharded.layout}
        return prepared.lowered.replica_facts.adding({"the call": [asked], **layout})

    def _described(self, known: Facts, call: str, more: Mapping[str, Sequence[str]] = NO_LINES) -> Facts:
        """Facts of a call, with the pipeline, the name and the number of the call, and `more` lines."""
        number = {"the number of the call": [f"call {self._number} of the pipeline {self._name}"]}
        return known.adding({**more, **({"the call": [call]} if call else {}), **number})


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, which takes a tenth of a millisecond where autocast is on."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else contextlib.nullcontext()
