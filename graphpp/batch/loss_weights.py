"""The weights of a step's losses, and the seeds that start each microbatch's backward.

Contract
--------
- The seed of a microbatch is the gradient of the step's loss with respect to the microbatch's loss, 0-dim. Without weights
  the step's loss is the mean or sum of the losses, or their mean weighted by rows. With `loss_weight` it is their weighted
  sum. A `GradScaler` multiplies the seeds and `accumulation_steps` divides them; no other option changes them.
- A microbatch of weight 0 adds 0 to the step's loss, and is `silent`: nothing to the gradients, even where its own are nan.
- A seed is bit-equal to the gradient that autograd computes for `loss / microbatches`, `loss * weight`,
  `scaler.scale(loss)` or `loss / microbatches / accumulation_steps`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.amp import GradScaler

from graphpp.arguments import COUNT, one_of, or_none, require
from graphpp.errors import BatchError, GraphPPError
from graphpp.options.gradients import Reduction
from graphpp.streams import from_host

LossWeight = float | Sequence[float] | torch.Tensor
_SCALER = or_none(one_of(GradScaler, takes="a torch.amp.GradScaler"))


@dataclass(frozen=True)
class LossArguments:
    """The loss arguments of a step, as the caller gave them."""

    weight: LossWeight | None = None
    scaler: GradScaler | None = None
    accumulation_steps: int = 1
    factor: float = 1.0  # of the loss's gradient

    @property
    def shares_overflow(self) -> bool:
        """Whether an overflow on one rank must be communicated to all ranks."""
        return self.scaler is not None and self.scaler.is_enabled()


NO_WEIGHTS = LossArguments()


@dataclass(frozen=True)
class LossWeighting:
    """Computes the step's loss and the seeds.

    `steps`: the number of accumulation steps, by which gradients are divided. `factor`: the gradient of the step's loss.
    """

    reduction: Reduction
    weights: tuple[float, ...] | None = None
    scaler: GradScaler | None = None
    steps: int = 1
    factor: float = 1.0
    by_rows: bool = False  # whether the weights are each microbatch's fraction of the rows

    @classmethod
    def of(cls, reduction: Reduction, arguments: LossArguments, rows: Sequence[int | None]) -> LossWeighting:
        """Check a step's arguments; `rows`: the rows of each microbatch, None for one without a batch dimension.

        Raises `BatchError` for a wrong weight or number of steps, `GraphPPError` for a scaler of another type.
        """
        steps, scaler = arguments.accumulation_steps, arguments.scaler
        require(BatchError, "accumulation_steps", COUNT, steps)
        require(GraphPPError, "scaler", _SCALER, scaler)
        if arguments.weight is not None:
            weights: tuple[float, ...] | None = _weights(arguments.weight, len(rows))
        else:
            weights = _by_rows(rows) if reduction == "rows" and len(set(rows)) > 1 else None
        by_rows = arguments.weight is None and weights is not None
        return cls(reduction, weights, scaler, steps, arguments.factor, by_rows)

    @property
    def description(self) -> list[str]:
        """The weights and the loss scale as text, for comparison among ranks."""
        enabled = self.scaler is not None and self.scaler.is_enabled()
        scale = f"loss scale {self.scaler.get_scale()}" if self.scaler is not None and enabled else "no loss scale"
        weights = "no weights" if self.weights is None else f"weights {self.weights}"
        return [weights, scale, f"accumulation over {self.steps} steps", f"gradient of the loss {self.factor}"]

    @property
    def silent(self) -> frozenset[int]:
        """The microbatches of weight 0."""
        return frozenset(index for index, weight in enumerate(self.weights or ()) if weight == 0)

    def seeds(self, count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        one = torch.full((), self.factor, dtype=dtype, device=device)
        one = one if self.steps == 1 else one / self.steps
        if self.weights is not None:
            seeds = [one * weight for weight in self.weights]
        else:
            seeds = [one if self.reduction == "sum" else one / count] * count
        return seeds if self.scaler is None else [self.scaler.scale(seed).to(dtype) for seed in seeds]

    def step_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """The step's loss, 0-dim, in the dtype of `losses`, [microbatches]."""
        if self.weights is not None:
            weights = from_host(torch.tensor(self.weights, dtype=losses.dtype), losses.device)
            return torch.where(weights == 0, 0, losses * weights).sum()
        return losses.sum() if self.reduction == "sum" else losses.mean()

    def means(self, metrics: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The mean of each metric over the microbatches, by their rows if the losses are, 0-dim, in float32 or wider.

        `metrics`: [microbatches] each.
        """
        weighting = self if self.by_rows else LossWeighting("mean")
        return {name: weighting.step_loss(wide(each)) for name, each in metrics.items()}


def wide(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers in float32, which are to be summed and reported; float64 stays."""
    return numbers if numbers.dtype == torch.float64 else numbers.float()


def _by_rows(rows: Sequence[int | None]) -> tuple[float, ...]:
    """Each microbatch's fraction of the rows of the batch."""
    known = [each for each in rows if each is not None]
    if len(known) < len(rows):
        raise BatchError(
            f"gradients.reduction: \"rows\" weighs microbatches by their rows, and microbatch {rows.index(None)} has no tensor "
            "with a batch dimension: give loss_weight= for this step"
        )
    return tuple(each / sum(known) for each in known)


def _weights(weight: LossWeight, microbatches: int) -> tuple[float, ...]:
    """One finite weight per microbatch. Raises `BatchError`."""
    try:
        values = torch.as_tensor(weight, dtype=torch.float64).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise BatchError(f"loss_weight must be a number, or one per microbatch, got {weight!r}") from error
    each = values.expand(microbatches) if values.dim() == 0 else values
    if each.shape != (microbatches,):
        raise BatchError(
            f"loss_weight has shape {list(values.shape)}, and the step has {microbatches} microbatches: give one number "
            "for each, or one for all."
        )
    numbers = tuple(each.tolist())
    wrong = [index for index, number in enumerate(numbers) if not math.isfinite(number)]
    if wrong:
        raise BatchError(f"loss_weight of microbatch {wrong[0]} is {numbers[wrong[0]]}: weights must be finite")
    return numbers
