"""`Pipeline`: what `graphpp.compile` returns. Cuts a batch, runs it, gathers what comes out.

Contract
--------
- Every method that runs something is called by all ranks; it does the same on all of them, or raises on all of them.
- Nothing of the caller's model changes but the local parameters' and buffers' device and values, and `param.grad`. A
  call that is refused changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from graphpp.batch import cut, leading_size, same_shape
from graphpp.capture import LossFunction
from graphpp.compiler import Built, Compiler, Settings
from graphpp.errors import BatchError, GraphPPError
from graphpp.library import Call, Library, Ready
from graphpp.report import merge_outputs
from graphpp.runtime import norms
from graphpp.runtime.agreement import Agreement
from graphpp.runtime.failure import FailureBoard
from graphpp.runtime.state import ModelState
from graphpp.signature import Leaves, Microbatch, unwrapped
from graphpp.verify_report import Verification


@dataclass(frozen=True)
class StepResult:
    """On every rank. `loss`: mean (or sum) over microbatches, 0-dim. `losses`: one per microbatch in order."""

    loss: torch.Tensor
    losses: torch.Tensor


@dataclass(frozen=True)
class EvalResult:
    """`output`: of the whole batch, on the last stage's rank. `loss`, `losses`: given a target, on every rank."""

    output: Any = None
    loss: torch.Tensor | None = None
    losses: torch.Tensor | None = None


class Pipeline:
    """A model cut into stages, ready to train; made by `graphpp.compile`, which documents the settings."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, settings: Settings, agreement: Agreement) -> None:
        self._model, self._loss, self._settings, self._agreement = model, loss, settings, agreement
        self._state = ModelState(model)
        self._library = Library(Compiler(model, loss, settings), self._state, agreement)
        self._last: Ready | None = None
        self._broken = False
        self._board = FailureBoard(settings.place.group, agreement.shared_name())
        if settings.example is not None:
            self._build(settings.example)

    # ------------------------------------------------------------------------------------------------ running

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Forward and backward of a whole batch, given on every rank; gradients accumulate in `param.grad`.

        Tensors whose first dimension is the batch's are cut into microbatches along it; wrap one in `graphpp.whole`
        to pass it whole. Raises `BatchError` where the batch does not divide.
        """
        return self._step(lambda: self._cut(Microbatch(args, kwargs, target)))

    def step_microbatches(self, microbatches: Sequence[Microbatch]) -> StepResult:
        """Like `step`, with the microbatches given one by one; all of one shape."""
        return self._step(lambda: _taken_apart(microbatches))

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> EvalResult:
        """The forward of a whole batch with the model in eval mode; no gradients, no buffer of training is touched.

        `output` stands on the rank of the last stage: tensors with a batch dimension joined along it, 0-dim floating
        tensors averaged over the microbatches, others stacked. `loss` is on every rank if a target was given.
        """
        with self._watched(), _eval_mode(self._model):
            call = self._alike(lambda: self._cut(Microbatch(args, kwargs, target)), training=False)
            ready = self._run(call)
            losses = ready.runner.losses() if target is not None else None
        outputs = ready.runner.take_outputs()
        merged = None if outputs is None else merge_outputs(ready.built.captured, outputs, leading_size(call.parts[0]))
        return EvalResult(merged, None if losses is None else self._reduced(losses), losses)

    def verify(self, *args: Any, target: Any = None, **kwargs: Any) -> Verification:
        """Check a step over this batch against the uncut graph and eager, as `graphpp.verify` does; changes nothing.

        In one process only: a rank of several holds the current values of its own parameters alone.
        """
        from graphpp.verify import verified  # it stands on api, which stands on this file

        if self._settings.place.ranks > 1:
            raise GraphPPError(
                "pipe.verify runs all stages in one process, and this rank holds only its own stages' parameters. Call "
                f"graphpp.verify(model, loss, example, split=..., schedule=..., ranks={self._settings.place.ranks}) in one "
                "process, before the job."
            )
        parts = self._with_targets(self._cut(Microbatch(args, kwargs, target)))
        self._state.move([*self._state.parameters, *self._state.buffers], self._settings.place.device)
        return verified(self._model, self._loss, self._settings, parts)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all ranks to a total norm of `max_norm`; returns the total norm before, 0-dim.

        Bit-equal to `torch.nn.utils.clip_grad_norm_` on the whole model. Called by every rank.
        """
        order = {fqn: place for place, fqn in enumerate(self._state.parameters)}
        owners = self._built().ranks_of_parameter
        place = self._settings.place
        slots = [norms.Slot(order[fqn], p, owners[fqn][0] == place.rank) for fqn, p in self.named_parameters()]
        with self._watched(), torch.no_grad():
            norm = norms.total_norm(slots, len(order), norm_type, place.group, place.device)
            norms.clip_(slots, max_norm, norm)
        return norm

    @property
    def bubble(self) -> float | None:
        """The share of the last call in which this rank stood still for others, 0 to 1; None before, and on CUDA."""
        return None if self._last is None else self._last.runner.bubble

    # ------------------------------------------------------------------------------------------------ this rank's part

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(FQN, parameter) of this rank's stages, in the model's order: the model's own objects."""
        local = self._built().parameters(self._settings.place.rank)
        return self._state.named(local, among=self._state.parameters)  # type: ignore[return-value]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, in the model's order: hand them to the optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(FQN, buffer) of this rank's stages, in the model's order."""
        return self._state.named(self._built().buffers(self._settings.place.rank), among=self._state.buffers)

    def state_dict(self) -> dict[str, Any]:
        """This rank's entries of the model's state dict, under the model's keys; all ranks' together are all of it."""
        return self._state.state_dict(self._local())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Copy this rank's entries of `state` (a rank's or the whole model's dict) into the model, in place.

        Raises `GraphPPError` where an entry is missing, or unknown to the model (`strict`), or has another shape; then
        nothing was changed.
        """
        self._state.load(self._local(), state, strict)

    def __repr__(self) -> str:
        """The plan as a table: stage, rank, FQNs, parameters, bytes sent, bytes saved."""
        built = self._library.first
        return "Pipeline(nothing captured yet: give example=, or run a step)" if built is None else str(built.plan)

    # ------------------------------------------------------------------------------------------------ inside

    def _step(self, make: Callable[[], list[Leaves]]) -> StepResult:
        with self._watched():
            call = self._alike(lambda: self._with_targets(make()), training=True)
            losses = self._run(call).runner.losses()
        return StepResult(self._reduced(losses), losses)

    def _build(self, example: Microbatch) -> None:
        with self._watched():
            call = self._alike(lambda: self._with_targets([unwrapped(example)]), training=True)
            self._library.build(call, self._settings.usual_microbatches)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """One call that all ranks make. Its tensors are normal ones, also where the caller is in inference mode."""
        with self._board.watching(), torch.inference_mode(False):
            yield

    def _alike(self, make: Callable[[], list[Leaves]], *, training: bool) -> Call:
        """The microbatches, of which all ranks have as many and of the same shape."""
        return self._agreement.together(lambda: self._library.call(make(), training=training), self._library.facts)

    def _run(self, call: Call) -> Ready:
        """Run a call once; its runner has what came out."""
        if self._broken:
            raise GraphPPError(
                "an earlier call of this pipeline ended midway, and messages between the ranks may still be under way: "
                "restart all ranks from the last checkpoint."
            )
        ready = self._library.ready(call)
        self._broken = self._settings.place.ranks > 1
        ready.runner.step([part.tensors for part in call.parts], ready.seeds)
        self._broken = False
        self._last = ready
        return ready

    def _cut(self, batch: Microbatch) -> list[Leaves]:
        return cut(batch, self._settings.microbatches_for(batch), self._settings.example)

    def _with_targets(self, parts: list[Leaves]) -> list[Leaves]:
        """The parts, or `BatchError` where the loss lacks its target or a target lacks its loss."""
        given = any(
            value is not None
            for path, value in zip(parts[0].paths, parts[0].values, strict=True)
            if path.startswith("target")
        )
        if self._loss is not None and not given:
            raise BatchError("the loss needs a target: step(..., target=...), or Microbatch(args, kwargs, target)")
        if self._loss is None and given:
            raise BatchError(
                "a target was given, but with loss=None the model's output brings its own loss and nothing reads the "
                "target. Pass loss= to graphpp.compile, or give the target as an argument of the model."
            )
        return parts

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean() if self._settings.loss_reduction == "mean" else losses.sum()

    def _built(self) -> Built:
        if self._library.first is None:
            raise GraphPPError("nothing is captured yet: give example= to graphpp.compile, or run a step first")
        return self._library.first

    def _local(self) -> set[str]:
        """FQNs of this rank's parameters and buffers."""
        built, rank = self._built(), self._settings.place.rank
        return built.parameters(rank) | built.buffers(rank)


def _taken_apart(microbatches: Sequence[Microbatch]) -> list[Leaves]:
    parts = [unwrapped(part) for part in microbatches]
    same_shape(parts)
    return parts


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode; every module's own flag is restored."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
