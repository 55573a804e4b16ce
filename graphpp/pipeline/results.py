"""The results of a step and of an evaluation, and the numbers of a step for hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp.schedules.simulate.timeline import Event


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


@dataclass(frozen=True)
class StepMetrics:
    """The numbers of one training step, on one rank.

    `step`: `pipe.steps` after it. `loss`: as `StepResult.loss`. `rows`: of the batch; None if a microbatch has no rows.
    `began`: in seconds of `time.time()`. `seconds`: from there until the step ended, on CUDA on the device. `waited`: the part
    of `seconds` in which the rank waited for messages of other stages; waits for collectives are not counted. `sent_bytes`: of
    the rank's messages to other stages. `shard_bytes`: sent for parameters and gradients along `dp_shard`; None without
    `dp_shard`, and for another number of microbatches than that of `pipe.plan`. `grad_norm`: of `clip_grad_norm_` after this
    step; None without a call. `peak_bytes`: `torch.cuda.max_memory_allocated()`, which the program may reset; None on a CPU.
    `actions`: the rank's, with times in seconds of `time.time()`; empty unless the hook asked for them.
    """

    step: int
    loss: float
    rows: int | None
    began: float
    seconds: float
    waited: float
    sent_bytes: int
    shard_bytes: int | None
    grad_norm: float | None
    peak_bytes: int | None
    actions: tuple[Event, ...] = ()
