"""The results of a step and of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class StepResult:
    """The result of a step, on every rank.

    `loss`: the mean (or sum, or weighted sum) over the microbatches, 0-dim, float32 or wider. `losses`: one per microbatch in
    its own dtype, [microbatches]. `metrics`: the numbers that the loss function returned with the loss, averaged over the
    microbatches, 0-dim, float32 or wider. `output`: with `memory.outputs`, as in `EvalResult`; else None. `metric_values`: the
    metrics of each microbatch, [microbatches], in their own dtypes.
    """

    loss: torch.Tensor
    losses: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    output: Any = None
    metric_values: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class EvalResult:
    """The result of an evaluation. `output`: of the whole batch, on the last stage's rank, or on all (`output="all"`); with
    `output="each"` a list with that of each microbatch, on all ranks.

    `loss`, `losses`, `metrics`, `metric_values`: as in `StepResult`, on every rank; `loss` and `losses` are None if the loss
    lacks its target.
    """

    output: Any = None
    loss: torch.Tensor | None = None
    losses: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metric_values: Mapping[str, torch.Tensor] = field(default_factory=dict)
