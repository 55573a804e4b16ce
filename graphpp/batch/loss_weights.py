"""The weights of a step's losses, and the seeds that start each microbatch's backward.

Contract
--------
- The seed of a microbatch is the gradient of the step's loss with respect to the microbatch's loss, 0-dim. Without weights
  the step's loss is the mean or the sum of the losses. With `loss_weight` it is their weighted sum, and a microbatch's seed
  is its weight. A `GradScaler` multiplies the seeds and nothing else.
- A seed is bit-equal to the gradient that autograd computes for `loss / microbatches`, `loss * weight` or
  `scaler.scale(loss)`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.amp import GradScaler

from graphpp.errors import BatchError, GraphPPError
from graphpp.options.gradients import Reduction

LossWeight = float | Sequence[float] | torch.Tensor


class DeferredScaler:
    """Passed as `step(..., scaler=)`: the step scales by `scaler`, and leaves the search for an overflow to this object."""

    scaler: GradScaler | None


@dataclass(frozen=True)
class LossWeighting:
    """The step's loss as a function of the microbatches' losses: weights, or a mean or sum; and the gradient scaler, if any."""

    reduction: Reduction
    weights: tuple[float, ...] | None = None
    scaler: GradScaler | None = None

    @classmethod
    def of(cls, reduction: Reduction, weight: LossWeight | None, scaler: object, microbatches: int) -> LossWeighting:
        """Read the arguments of a step: `weight` is one number for all microbatches or one for each.

        Raises `BatchError` for a wrong weight, `GraphPPError` for a scaler of another type.
        """
        if scaler is not None and not isinstance(scaler, GradScaler):
            raise GraphPPError(f"scaler must be a torch.amp.GradScaler, got {type(scaler).__name__}")
        return cls(reduction, None if weight is None else _weights(weight, microbatches), scaler)

    @property
    def description(self) -> list[str]:
        """The weights and the loss scale as text, which ranks compare."""
        enabled = self.scaler is not None and self.scaler.is_enabled()
        scale = f"loss scale {self.scaler.get_scale()}" if self.scaler is not None and enabled else "no loss scale"
        return ["no weights" if self.weights is None else f"weights {self.weights}", scale]

    def seeds(self, count: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """One seed per microbatch, 0-dim."""
        one = torch.ones((), dtype=dtype, device=device)
        if self.weights is not None:
            seeds = [one * weight for weight in self.weights]
        else:
            seeds = [one / count if self.reduction == "mean" else one] * count
        return seeds if self.scaler is None else [self.scaler.scale(seed).to(dtype) for seed in seeds]

    def step_loss(self, losses: torch.Tensor) -> torch.Tensor:
        """The step's loss, 0-dim, from the losses of its microbatches, [microbatches]."""
        if self.weights is not None:
            # Pinned: copying from pageable memory would make the host wait.
            weights = torch.tensor(self.weights, dtype=losses.dtype, pin_memory=losses.is_cuda)
            return (losses * weights.to(losses.device, non_blocking=True)).sum()
        return losses.mean() if self.reduction == "mean" else losses.sum()


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
