"""`Pipeline`: what `graphpp.compile` returns. Cuts a batch, captures what is new, runs it, gathers what comes out.

Contract
--------
- One captured graph per signature of a microbatch (shapes, dtypes, structure, training flags); one runner per graph and
  number of microbatches. All ranks compare what they captured before its first step.
- Nothing of the caller's model changes but the local parameters' and buffers' device and values, and `param.grad`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphpp import signature
from graphpp.capture import LossFunction
from graphpp.compiler import Built, Compiler, Settings
from graphpp.errors import BatchError, GraphPPError
from graphpp.report import merge_outputs
from graphpp.runtime import agreement, norms
from graphpp.runtime.failure import FailureBoard
from graphpp.runtime.runner import GraphPPRunner
from graphpp.runtime.state import ModelState
from graphpp.signature import Microbatch


@dataclass(frozen=True)
class StepResult:
    """`loss`: mean (or sum) over microbatches, 0-dim. `losses`: one per microbatch in order, [microbatches]. On every rank."""

    loss: torch.Tensor
    losses: torch.Tensor


@dataclass(frozen=True)
class EvalResult:
    """`output`: the model's output for the whole batch, on the last stage's rank (else None). `loss`: given a target, on every rank."""

    output: Any = None
    loss: torch.Tensor | None = None
    losses: torch.Tensor | None = None


@dataclass
class _Kept:
    """What a pipeline has made so far."""

    built: dict[Any, Built] = field(default_factory=dict)
    runners: dict[Any, GraphPPRunner] = field(default_factory=dict)
    seeds: dict[Any, list[torch.Tensor]] = field(default_factory=dict)


class Pipeline:
    """A model cut into stages, ready to train; made by `graphpp.compile`, which documents the settings."""

    def __init__(self, model: nn.Module, loss: LossFunction | None, settings: Settings) -> None:
        self._model, self._loss, self._settings = model, loss, settings
        self._state = ModelState(model)
        self._compiler = Compiler(model, loss, settings)
        self._board = FailureBoard(settings.place.group)
        self._kept = _Kept()
        self._training_built: Built | None = None
        if settings.example is not None:
            self._prepared(settings.example, training=True)

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Forward and backward of a whole batch, given on every rank; gradients accumulate in `param.grad`.

        Tensors whose first dimension is the batch's are cut into microbatches along it; wrap one in `graphpp.whole`
        to pass it whole. Raises `BatchError` where the batch does not divide.
        """
        return self._step(lambda: self._cut(Microbatch(args, kwargs, target)))

    def step_microbatches(self, microbatches: Sequence[Microbatch]) -> StepResult:
        """Like `step`, with the microbatches given one by one; all of one shape."""
        return self._step(lambda: list(microbatches))

    def eval(self, *args: Any, target: Any = None, **kwargs: Any) -> EvalResult:
        """The forward of a whole batch with the model in eval mode; no gradients, no buffer of training is touched.

        `output` stands on the rank of the last stage: tensors with a batch dimension joined along it, 0-dim floating
        tensors averaged over the microbatches, others stacked. `loss` is on every rank if a target was given.
        """
        with _eval_mode(self._model):
            parts = self._together(lambda: self._cut(Microbatch(args, kwargs, target)))
            built, runner = self._runner(parts, training=False)
            with self._board.watching():
                runner.step([self._inputs(part) for part in parts], [])
                losses = runner.losses() if target is not None else None
        outputs = runner.outputs()
        merged = None if outputs is None else merge_outputs(built.captured, outputs, signature.batch_size(parts[0]))
        return EvalResult(merged, None if losses is None else self._reduced(losses), losses)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(FQN, parameter) of this rank's stages, in the model's order: the model's own objects."""
        local = self._local(lambda stage: stage.parameters)
        return self._state.select(local, among=self._state.parameters)  # type: ignore[return-value]

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, in the model's order: hand them to the optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(FQN, buffer) of this rank's stages, in the model's order."""
        return self._state.select(self._local(lambda stage: stage.buffers), among=self._state.buffers)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parameters and persistent buffers under the model's FQNs; the ranks' dicts together are the model's."""
        buffers = ((fqn, buffer) for fqn, buffer in self.named_buffers() if self._state.persistent(fqn))
        return {fqn: tensor.detach() for fqn, tensor in (*self.named_parameters(), *buffers)}

    def load_state_dict(self, state: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Copy this rank's entries of `state` (a rank's or the whole model's dict) into the model, in place.

        Raises `GraphPPError` where an entry is missing (`strict`) or has another shape; then nothing was changed.
        """
        mine = self.state_dict()
        missing = [fqn for fqn in mine if fqn not in state]
        wrong = [fqn for fqn in mine if fqn in state and state[fqn].shape != mine[fqn].shape]
        if (missing and strict) or wrong:
            raise GraphPPError(f"the state dict does not fit this rank: missing {missing[:5]}, of another shape {wrong[:5]}")
        with torch.no_grad():
            for fqn, tensor in mine.items():
                if fqn in state:
                    tensor.copy_(state[fqn])

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all ranks to a total norm of `max_norm`; returns the total norm before, 0-dim.

        Bit-equal to `torch.nn.utils.clip_grad_norm_` on the whole model. Called by every rank.
        """
        order = {fqn: place for place, fqn in enumerate(self._state.parameters)}
        owners = self._built().first_rank_of_parameter
        slots = [
            norms.Slot(order[fqn], parameter, owners[fqn] == self._settings.place.rank)
            for fqn, parameter in self.named_parameters()
        ]
        place = self._settings.place
        with torch.no_grad():
            norm = norms.total_norm(slots, len(order), norm_type, place.group, place.device)
            norms.clip_(slots, max_norm, norm)
        return norm

    def __repr__(self) -> str:
        """The plan as a table: stage, rank, FQNs, parameters, bytes sent, bytes saved."""
        if self._training_built is None:
            return "Pipeline(nothing captured yet: give example=, or run a step)"
        return str(self._training_built.plan)

    # ------------------------------------------------------------------------------------------------ inside

    def _step(self, cut: Any) -> StepResult:
        parts = self._together(cut)
        self._check_targets(parts)
        built, runner = self._runner(parts, training=True)
        with self._board.watching():
            runner.step([self._inputs(part) for part in parts], self._seeds(built, len(parts)))
            losses = runner.losses()
        return StepResult(self._reduced(losses), losses)

    def _together(self, cut: Any) -> list[Microbatch]:
        """Cut a batch; a fault on this rank before the first step is told to ranks that have none."""
        try:
            parts: list[Microbatch] = cut()
            if not parts:
                raise BatchError("a step needs at least one microbatch")
            kinds = {signature.signature(part) for part in parts}
            if len(kinds) > 1:
                raise BatchError(
                    "the microbatches of one step differ in shape, dtype or structure: pad them to one shape, "
                    "or run them in steps of their own."
                )
        except BatchError as error:
            self._compare(agreement.failed(error)) if not self._kept.built else None
            raise
        return parts

    def _check_targets(self, parts: Sequence[Microbatch]) -> None:
        if self._loss is not None and any(part.target is None for part in parts):
            error = BatchError("the loss needs a target: step(..., target=...), or Microbatch(args, kwargs, target)")
            if not self._kept.built:
                self._compare(agreement.failed(error))
            raise error

    def _cut(self, batch: Microbatch) -> list[Microbatch]:
        return signature.cut(batch, self._settings.microbatches_for(batch))

    def _inputs(self, part: Microbatch) -> dict[str, torch.Tensor]:
        device = self._settings.place.device
        return {path: tensor.to(device, non_blocking=True) for path, tensor in signature.tensors(part).items()}

    def _prepared(self, example: Microbatch, *, training: bool) -> Built:
        """The captured, cut graph for microbatches like `example`; compiled once, the ranks compared."""
        flags = tuple(module.training for module in self._model.modules())
        key = (training, flags, signature.signature(example))
        if key not in self._kept.built:
            try:
                built = self._compiler.build(example, training)
            except Exception as error:
                self._compare(agreement.failed(error))
                raise
            self._compare(built.facts)
            self._kept.built[key] = built
            if training or self._training_built is None:
                self._training_built = built
        return self._kept.built[key]

    def _compare(self, facts: agreement.Facts) -> None:
        agreement.agree(facts, self._settings.place.group, self._settings.place.device)

    def _runner(self, parts: Sequence[Microbatch], *, training: bool) -> tuple[Built, GraphPPRunner]:
        built = self._prepared(parts[0], training=training)
        key = (id(built), len(parts))
        if key not in self._kept.runners:
            schedule = self._compiler.schedule(built, len(parts))
            self._state.move((*self._local(lambda s: s.parameters), *self._local(lambda s: s.buffers)), self._settings.place.device)
            self._kept.runners[key] = GraphPPRunner(built.program, schedule, self._state, self._settings.place)
        return built, self._kept.runners[key]

    def _seeds(self, built: Built, count: int) -> list[torch.Tensor]:
        """The gradient of the step's loss with respect to each microbatch's loss, as autograd would make it."""
        key = (id(built), count)
        if key not in self._kept.seeds:
            assert built.program.loss is not None
            one = torch.ones((), dtype=built.program.loss.dtype, device=self._settings.place.device)
            seed = one / count if self._settings.loss_reduction == "mean" else one
            self._kept.seeds[key] = [seed] * count
        return self._kept.seeds[key]

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        return losses.mean() if self._settings.loss_reduction == "mean" else losses.sum()

    def _built(self) -> Built:
        if self._training_built is None:
            raise GraphPPError("nothing is captured yet: give example= to graphpp.compile, or run a step first")
        return self._training_built

    def _local(self, what: Any) -> set[str]:
        built = self._built()
        return {fqn for stage in built.local_stages(self._settings.place.rank) for fqn in what(stage)}


@contextlib.contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """The model in eval mode while it is captured; every module's own flag is restored."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in flags:
            module.training = training
