"""The numbers that a pipeline must reach: plain gradient accumulation in one eager process.

Contract: `eager_steps` copies the model, leaves the caller's as it is, and does what a careful person would write by
hand: for each microbatch in order `(loss / M).backward()` (or `loss.backward()` for `reduction="sum"`), then clipping
and the optimizer. Nothing here knows graphpp.
"""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.models import Batch, Loss

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Eager:
    """What the eager steps gave; names are the model's FQNs."""

    losses: list[Tensor] = field(default_factory=list)  # per step [microbatches]
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)  # per step, before clipping; None: unused
    norms: list[Tensor] = field(default_factory=list)  # per step, if clipped
    params: dict[str, Tensor] = field(default_factory=dict)  # after the last step
    buffers: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the comparisons; a step large enough to show a wrong gradient."""
    return torch.optim.AdamW(params, lr=1e-2)


def eager_steps(
    model: nn.Module,
    loss: Loss | None,
    batches: Sequence[Batch],
    microbatches: int,
    steps: int = 3,
    optimizer: Optimizer | None = adamw,
    *,
    max_norm: float | None = None,
    reduction: str = "mean",
) -> Eager:
    """Train a copy of the model for `steps` steps on the batches in turn, from zero gradients each step.

    `optimizer` makes one from the parameters; None: parameters stay. `max_norm` clips.
    """
    model = deepcopy(model)
    update = optimizer(model.parameters()) if optimizer else None
    scale = microbatches if reduction == "mean" else 1
    eager = Eager()
    for step in range(steps):
        model.zero_grad()
        pieces = batches[step % len(batches)].microbatches(microbatches)
        eager.losses.append(torch.stack([_backward(model, loss, piece, scale) for piece in pieces]))
        eager.grads.append(gradients(model))
        if max_norm is not None:
            eager.norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        if update:
            update.step()
    eager.params.update((name, param.detach()) for name, param in model.named_parameters())
    eager.buffers.update(model.named_buffers())
    return eager


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients by FQN; None where a parameter has none."""
    named = model.named_parameters()
    return {name: None if param.grad is None else param.grad.clone() for name, param in named}


def model_loss(model: nn.Module, loss: Loss | None, batch: Batch) -> Tensor:
    """The scalar loss of one microbatch."""
    output = model(*batch.args, **batch.kwargs)
    return output.loss if loss is None else loss(output, batch.target)


def _backward(model: nn.Module, loss: Loss | None, batch: Batch, scale: int) -> Tensor:
    """Add one microbatch's share to the gradients; its loss, unscaled."""
    value = model_loss(model, loss, batch)
    (value / scale if scale != 1 else value).backward()
    return value.detach()
