"""The calls of a pipeline that every rank makes: agreed upon, prepared, run.

Contract
--------
- Every method but `check_whole` is called by all ranks. Each does the same on all ranks, or raises on all ranks.
- A call has a number, which counts the calls of this pipeline on this rank. Before anything runs, ranks compare the pipeline,
  the number, the kind and the arguments of a call, and checksums of the data that they were given.
- After a call that ended midway every later call raises `GraphPPError`: the other ranks may still be in that call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

import torch

from graphpp.batch.cut_batch import leading_size
from graphpp.batch.loss_weights import NO_WEIGHTS, LossArguments, LossWeighting
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.compiler import facts
from graphpp.errors import GraphPPError
from graphpp.options.options import Options
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.data_parallel import average_, broadcast_
from graphpp.parallel.facts import Facts
from graphpp.parallel.failure import FailureBoard
from graphpp.parallel.place import RankPlace
from graphpp.parallel.timeouts import Timeouts
from graphpp.pipeline.given_data import checksums, filled
from graphpp.pipeline.grad_norm import RankGradients
from graphpp.pipeline.graph_cache import GraphCache, PreparedStep
from graphpp.pipeline.step_call import StepCall
from graphpp.runtime.model_state import ModelState

T = TypeVar("T")
MakeParts = Callable[[], list[FlatMicrobatch]]


class Calls:
    """The calls of one pipeline on this rank."""

    def __init__(
        self, options: Options, place: RankPlace, agreement: Agreement, cache: GraphCache, state: ModelState
    ) -> None:
        self._options, self._place, self._agreement, self._cache, self._state = options, place, agreement, cache, state
        self._replicas = Agreement(place.replicas, place.device)
        self._name = agreement.shared_name()
        self._board = FailureBoard(place.group, self._name)
        self._every = options.parallel.check_data if agreement.several else 0
        parallel = options.parallel
        self._timeouts = Timeouts((place.group, place.replicas), parallel.timeout, parallel.start_timeout)
        self._number = 0
        self._codes: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # of gradients: this rank's own, and all ranks'
        self._broken = False
        self._compared = False  # the values with which the replicas begin
        self.last: PreparedStep | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """A context around a call of all ranks: if one rank fails, the others raise `RankFailure`.

        Tensors made in it are no inference tensors, also where the caller is in inference mode.
        """
        self._number += 1
        with self._board.watching(), torch.inference_mode(False):
            yield

    def agreed(self, call: str, read: Callable[[], T], own: RankGradients) -> tuple[T, RankGradients]:
        """The arguments of a call, and the gradients with the codes of all ranks, if all ranks make this call.

        `read` reads the arguments of this rank. Ranks exchange codes only if a rank's own have changed since the call before.
        Raises the error of this rank's `read`, and `MismatchError` where another rank failed or differs.
        """
        self.check_whole()
        known = self._codes[1] if self._codes is not None and self._codes[0] == own.codes else None
        sums = {"the dtypes of gradients": None if known is None else 0}

        def facts_of(arguments: T) -> Facts:
            return self._described(Facts({"its arguments": [str(arguments)]}), call).with_sums(sums)

        arguments, changed = self._agreement.together_or_lacking(read, facts_of)
        if changed:
            known = tuple(self._agreement.largest(torch.tensor(own.codes, dtype=torch.int64, device="cpu")).tolist())
            self._codes = own.codes, known
        assert known is not None
        return arguments, replace(own, codes=known)

    def evaluation(self, make: MakeParts, weights: LossArguments) -> tuple[StepCall, PreparedStep]:
        """Prepare an evaluation."""
        call, lacking = self._agreed(make, weights, training=False)
        return self._with_data(call, self._prepared(call), lacking)

    def training(
        self, make: MakeParts, weights: LossArguments = NO_WEIGHTS, asked: str = "step"
    ) -> tuple[StepCall, PreparedStep]:
        """Prepare a training call, on all replicas or on none, because each replica waits for the gradients of the others.

        `make` makes this rank's microbatches. `asked`: the name of the call.
        """

        def prepare() -> tuple[StepCall, PreparedStep]:
            call, lacking = self._agreed(make, weights, training=True, asked=asked)
            return self._with_data(call, self._prepared(call), lacking)

        def facts_of(made: tuple[StepCall, PreparedStep]) -> Facts:
            known = made[1].lowered.replica_facts.adding("the call", [asked])
            if self._compared or not self._replicas.several:
                return known
            values = facts.of_tensors if self._options.parallel.replica_values == "broadcast" else facts.of_replicas
            return known.joined(values(self._state, self._cache.local()))

        self.check_whole()
        made = self._replicas.together(prepare, facts_of)
        if not self._compared and self._options.parallel.replica_values == "broadcast" and self._place.replicas is not None:
            broadcast_([self._state.tensor(fqn) for fqn in sorted(self._cache.local())], self._place.replicas)
        self._compared = True
        return made

    def compile(self, make: MakeParts, microbatches: int) -> None:
        """Compile the graphs of a training call, for a table of so many microbatches, and run nothing."""
        with self._timeouts.starting():
            call, _ = self._agreed(make, NO_WEIGHTS, training=True, asked="compile")
            self._cache.compile(call, microbatches)

    def run(self, call: StepCall, prepared: PreparedStep) -> PreparedStep:
        """Run a call once; afterwards the runner has the results."""
        place = self._place
        loss = prepared.runner.program.loss
        seeds = call.weighting.seeds(len(call.parts), loss.dtype, place.device) if loss is not None else []
        self._broken = place.ranks > 1 or (call.training and self._replicas.several)
        with torch.autocast(place.device.type, enabled=False):  # its casts are in the graph
            prepared.runner.step(prepared.inputs(call.parts), seeds)
        if call.training:
            self._share_buffers(prepared)
        self._broken = False
        self._cache.after_step(call, prepared)
        self.last = prepared
        return prepared

    def _share_buffers(self, prepared: PreparedStep) -> None:
        """Make the buffers that the forward wrote equal on all replicas, if so asked."""
        how, replicas = self._options.parallel.replica_buffers, self._place.replicas
        if how != "own" and replicas is not None:
            stages = [stage for program in prepared.runner.programs for stage in program.stages]
            own = {fqn for stage in stages if stage.index in prepared.runner.stages for fqn in stage.written_buffers}
            tensors = [self._state.tensor(fqn) for fqn in sorted(own)]
            (broadcast_ if how == "broadcast" else average_)(tensors, replicas)

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
            known = self._described(self._cache.facts(made), asked)
            return known.with_sums(checksums(made.parts, self._number, self._every))

        self.check_whole()
        return self._agreement.together_or_lacking(make_call, facts_of)

    def _prepared(self, call: StepCall) -> PreparedStep:
        """The call with its runner; a new call is compiled under the timeout of the start."""
        if self._cache.has(call):
            return self._cache.prepared(call)
        with self._timeouts.starting():
            return self._cache.prepared(call)

    def _described(self, known: Facts, call: str) -> Facts:
        """Facts of a call, with the pipeline, the name and the number of the call."""
        number = f"call {self._number} of the pipeline {self._name}"
        return (known.adding("the call", [call]) if call else known).adding("the number of the call", [number])

    def _with_data(self, call: StepCall, prepared: PreparedStep, lacking: bool) -> tuple[StepCall, PreparedStep]:
        """The call with the data that this rank reads, if a rank was not given all data."""
        if not lacking:
            return call, prepared
        parts = filled(call.parts, prepared.reads(), self._number, self._every, self._agreement)
        return replace(call, parts=parts), prepared
