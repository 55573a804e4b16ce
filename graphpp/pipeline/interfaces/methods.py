"""The methods of a pipeline for loops of others: a module whose loss has a backward, and the schedule object of torch."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch.amp import GradScaler

from graphpp.arguments import FLAG, NUMBER, Accepted, checked, or_none
from graphpp.batch.loss_weights import LossArguments, LossWeight
from graphpp.batch.microbatch import Microbatch, whole_each
from graphpp.errors import BatchError, GraphPPError
from graphpp.options.options import Options
from graphpp.pipeline import grad_norm as norms
from graphpp.pipeline.interfaces.as_module import PipelineModule
from graphpp.pipeline.interfaces.as_schedule import NO_OUTPUTS, Calls, TorchSchedule, trees
from graphpp.pipeline.interfaces.step_gradients import StepGradients
from graphpp.pipeline.outputs import OutputRanks, as_bytes
from graphpp.pipeline.rank_part import RankPart
from graphpp.pipeline.read_batch import Batch, OneByOne
from graphpp.pipeline.results import EvalResult, StepResult
from graphpp.runtime.released import drop, dropped

_SCALE = Accepted("a positive number", lambda value: NUMBER.accepts(value) and 0 < value < float("inf"))  # type: ignore[operator]


class Interfaces(RankPart):
    """The base of `Pipeline` for other interfaces to it."""

    _options: Options

    @checked(GraphPPError, loss_scale=_SCALE)
    def as_module(self, loss_scale: float = 1.0) -> PipelineModule:
        """This pipeline as an `nn.Module` whose loss has a backward: `module(x, target=y).loss.backward()`.

        For loops and trainers that call forward, `zero_grad`, backward and step apart, and scale the loss. `loss_scale`: the
        gradient of the loss that the first backward will have, such as the first scale of a `GradScaler`. Raises
        `GraphPPError` before anything is captured: give `example=` to `graphpp.compile`.
        """
        self._cache.captured()
        return PipelineModule(self, self._model, self._step_apart, self.eval, self._deliver, loss_scale)

    @checked(GraphPPError, return_outputs=FLAG, loss_weight=or_none(_SCALE))
    def as_schedule(self, return_outputs: bool = True, loss_weight: float | None = None) -> TorchSchedule:
        """This pipeline behind the interface of the schedule objects of `torch.distributed.pipelining`.

        `return_outputs`: whether `step` returns the model's output, for which the pipeline needs `memory.outputs`. Raises
        `GraphPPError` if the pipeline lacks it. `loss_weight`: that of each step, such as the number of replicas for gradients
        that add up over replicas; the losses that a caller gets are without it.
        """
        if return_outputs and not self._options.memory.outputs:
            raise GraphPPError(NO_OUTPUTS)
        scale_grads = self._options.gradients.reduction != "sum"
        return TorchSchedule(cast(Calls, self), self._calls.exchanged, scale_grads, return_outputs, loss_weight)

    def prepare(self, *args: Any, target: Any = None, loss_kwargs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Capture and plan `step` with these arguments, without a step; as `example=` of `graphpp.compile`, with a whole batch.

        Afterwards the pipeline has its stages: give `pipe.parameters()` to the optimizer. Called by all ranks.
        Raises as `step`.
        """
        with self._calls.watched():
            self._calls.compile(Microbatch(args, kwargs, target, whole_each(loss_kwargs)))

    def let_optimizers_drop(self, parameters: Iterable[torch.Tensor], optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """Let optimizers drop those of these parameters that other ranks hold: `optimizers` now, others at their next step.

        For an optimizer that was made of `model.parameters()`; without this call its step raises `GraphPPError`. `parameters`:
        the model's, of the time when the optimizer was made. Raises `GraphPPError` before anything is captured.
        """
        own = set(map(id, self.parameters()))
        dropped(each for each in parameters if id(each) not in own)
        for optimizer in optimizers:
            drop(optimizer)

    @contextlib.contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A context around work of every rank: an error of one rank is raised there, and as `MismatchError` on the others.

        `what`: the name of the work, which must be equal on all ranks. For checks of this rank's arguments before a call of
        all ranks.
        """
        with self._calls.all_ranks(what):
            yield

    def from_first_rank(self, make: Callable[[], bytes]) -> bytes:
        """The bytes that `make` returns on the first of all ranks, on every rank. Called by all ranks.

        An error of `make` is raised there, and as `MismatchError` on the others.
        """
        with self._calls.watched():
            self._calls.check_whole()
            return self._place.agreement(self._place.everyone).from_first(make)

    def shared_microbatches(self, microbatches: Sequence[Microbatch] | None) -> list[Microbatch]:
        """The microbatches on every rank: a rank that has None gets those of another, with absent tensors for the data.

        Called by all ranks, for `step_microbatches` and `eval_microbatches`. Raises `BatchError` if no rank has any.
        """
        given = None if microbatches is None else list(microbatches)
        sent = self._calls.exchanged(lambda: as_bytes(given and trees(given), "the microbatches"))
        ranks = [pickle.loads(each) for each in sent]
        if given is not None:
            return given
        found = next((each for each in ranks if each is not None), None)
        if found is None:
            raise BatchError("no rank was given microbatches: give them on one rank at least")
        return [Microbatch(**each) for each in found]

    def step_microbatches(
        self,
        microbatches: Sequence[Microbatch],
        *,
        loss_weight: LossWeight | None = None,
        scaler: GradScaler | None = None,
        accumulation_steps: int = 1,
        output: OutputRanks = "last",
    ) -> StepResult:
        """Like `step`, with the microbatches given one by one, in any shapes.

        `output`: the ranks and the form of `StepResult.output`, as in `eval`. Raises `GraphPPError` for "all" and "each" if the
        pipeline lacks `memory.outputs`.
        """
        return self._step(OneByOne(microbatches), LossArguments(loss_weight, scaler, accumulation_steps), output)

    def eval_microbatches(
        self, microbatches: Sequence[Microbatch], *, loss_weight: LossWeight | None = None, output: OutputRanks = "last"
    ) -> EvalResult:
        """Like `eval`, with the microbatches given one by one."""
        return self._evaluate(OneByOne(microbatches), LossArguments(loss_weight), output)

    def eval(self, *args: Any, **kwargs: Any) -> EvalResult:
        raise NotImplementedError

    def _evaluate(self, batch: Batch, weights: LossArguments, output: OutputRanks) -> EvalResult:
        raise NotImplementedError

    def _step(self, batch: Batch, weights: LossArguments, output: OutputRanks) -> StepResult:
        raise NotImplementedError

    def _step_apart(self, batch: Microbatch, weights: LossArguments) -> tuple[StepResult, StepGradients]:
        """A step whose gradients are not in `param.grad`."""
        gradients = StepGradients(dict(self.named_parameters()), self._cache.ownership.flat_parts)
        with self._calls.watched():
            with gradients.kept_apart():
                result, gradients.hooked = self._run_step(batch, weights)
            self._note(result)
        return result, gradients

    def _deliver(self, gradients: StepGradients, factor: float, share_overflow: bool) -> None:
        """Add the gradients of a step, times `factor`, to `param.grad`."""
        with self._calls.watched(), torch.no_grad():
            gradients.deliver(factor)
            if share_overflow:
                with self._calls.exchanging():
                    norms.share_overflow_(self._gradients())

    def _run_step(self, batch: Batch, weights: LossArguments) -> tuple[StepResult, Collection[str]]:
        """A step, and the FQNs of parameters with hooks on their gradients."""
        raise NotImplementedError

    def _gradients(self) -> norms.RankGradients:
        raise NotImplementedError

    def _note(self, result: StepResult) -> None:
        """Count a step and record its loss."""
        raise NotImplementedError
