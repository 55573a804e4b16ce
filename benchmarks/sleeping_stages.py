"""Stages that compute without a core: operators that sleep for their time, the model made of them, and its exact costs.

Contract
--------
- `forward`, `input_grad` and `weight_grad` are operators of PyTorch in the namespace `sleeping`. Each returns its result
  `seconds` after its own start, and at most `_SPIN` seconds of that time uses a core. `weight_grad` is reached only from the
  gradient of a weight, so a backward that is split has `input_grad` in I and `weight_grad` in W.
- `workload(numbers, times)` is a workload as of `workloads.py`, with one such layer for each stage: `x * weight`.
- `costs(times)` are the times of its stages: of F, I and W, in seconds; `alike(stages, seconds)` has equal ones. The first
  stage has no `input_grad`, because nobody needs the gradient of the batch.
- `product_workload` and `product_costs` are the same for layers `gelu(x @ weight)` that may be recomputed, as operators of
  others may not: from then on every matrix product of two matrices on the CPU takes `seconds`. F and R have one, the whole
  backward two.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from workloads import Batch, Size, Workload

import graphpp

Seconds = tuple[float, float, float]
"""Of F, of I and of W."""

_SPIN = 1e-4  # a sleep ends late by about so many seconds; the rest of the time is spent in a loop


def sleep(began: float, seconds: float) -> None:
    """Return `seconds` after `began`, a time of `time.perf_counter`.

    Two sleeps: the first one, which is long, ends late by up to 0.3 ms.
    """
    for early in (4 * _SPIN, _SPIN):
        rest = began + seconds - time.perf_counter() - early
        if rest > 0:
            time.sleep(rest)
    while time.perf_counter() < began + seconds:
        pass


def forward(x: Tensor, weight: Tensor, seconds: float, of_input: float, of_weight: float) -> Tensor:
    """`x * weight`, [rows, numbers]; the backward takes the other seconds."""
    began = time.perf_counter()
    result = x * weight
    sleep(began, seconds)
    return result


def input_grad(gradient: Tensor, weight: Tensor, seconds: float) -> Tensor:
    """The gradient of `x`."""
    began = time.perf_counter()
    result = gradient * weight
    sleep(began, seconds)
    return result


def weight_grad(gradient: Tensor, x: Tensor, seconds: float) -> Tensor:
    """The gradient of `weight`, [numbers]."""
    began = time.perf_counter()
    result = (gradient * x).sum(0)
    sleep(began, seconds)
    return result


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.seconds = inputs[3:]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.BackwardCFunction, gradient: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    seconds = ctx.seconds  # type: ignore[attr-defined]
    of_x = torch.ops.sleeping.input_grad(gradient, weight, seconds[0]) if ctx.needs_input_grad[0] else None
    of_weight = torch.ops.sleeping.weight_grad(gradient, x, seconds[1]) if ctx.needs_input_grad[1] else None
    return of_x, of_weight, None, None, None


def _like_first(first: Tensor, other: Tensor, *seconds: float) -> Tensor:
    return torch.empty_like(first)


def _like_weight(gradient: Tensor, x: Tensor, seconds: float) -> Tensor:
    return x.new_empty(x.shape[1:])


def _register() -> None:
    """Make the operators. `torch.library.custom_op` would add checks for aliases to each call: 35 µs after 20 ms of sleep."""
    for operator, fake in ((forward, _like_first), (input_grad, _like_first), (weight_grad, _like_weight)):
        name = f"sleeping::{operator.__name__}"
        torch.library.define(name, torch.library.infer_schema(operator, mutates_args=()))
        torch.library.impl(name, "CPU", operator)
        torch.library.register_fake(name, fake)
    torch.library.register_autograd("sleeping::forward", _backward, setup_context=_keep)


if not hasattr(torch.ops.sleeping, "forward"):  # a process may import this file again
    _register()


class Sleeper(nn.Module):
    """`x * weight`; F, I and W take these seconds."""

    def __init__(self, numbers: int, seconds: Seconds) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.rand(numbers) + 0.5), seconds

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.sleeping.forward(x, self.weight, *self.seconds)
        return result


class Sleepers(nn.Module):
    """One layer after the other."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def workload(numbers: int, times: Sequence[Seconds]) -> Workload:
    """A layer for each stage; a row has so many numbers."""

    def model(size: Size) -> nn.Module:
        return Sleepers([Sleeper(size.dim, seconds) for seconds in times])

    return Workload("sleeping", Size(dim=numbers, layers=len(times)), model, part, loss, batch)


def part(model: nn.Module, start: int, end: int) -> nn.Module:
    assert isinstance(model, Sleepers)
    return Sleepers(list(model.layers[start:end]))


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batch(size: Size, rows: int, generator: torch.Generator) -> Batch:
    draw = partial(torch.randn, rows, size.dim, generator=generator)
    return draw(), draw()


class Product(nn.Module):
    """`gelu(x @ weight)`; its backward reads the product."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(numbers, numbers) / numbers)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x @ self.weight)


_took: list[float] = []  # the seconds of a matrix product, once products sleep


def product_workload(numbers: int, stages: int, seconds: float) -> Workload:
    if not _took:
        with warnings.catch_warnings(action="ignore"):  # torch warns that its own kernel is replaced
            torch.library.impl("aten::mm", "CPU", _sleeping_product)
    _took[:] = [seconds]

    def model(size: Size) -> nn.Module:
        return Sleepers([Product(size.dim) for _ in range(size.layers)])

    return Workload("products", Size(dim=numbers, layers=stages), model, part, loss, batch)


def _sleeping_product(a: Tensor, b: Tensor) -> Tensor:
    began = time.perf_counter()
    result = torch.bmm(a[None], b[None])[0]
    sleep(began, *_took)
    return result


def product_costs(stages: int, seconds: float) -> graphpp.Costs:
    """The times of stages that are recomputed, in line or by an R."""
    plain = costs(alike(stages, seconds))
    return replace(
        plain, stages=tuple(replace(each, input_grad=each.input_grad + seconds, ahead=each) for each in plain.stages)
    )


def alike(stages: int, seconds: float) -> list[Seconds]:
    """Stages of which F, I and W take `seconds` each."""
    return [(seconds, seconds, seconds)] * stages


def costs(times: Sequence[Seconds]) -> graphpp.Costs:
    """The times of the stages; messages take no time."""
    first, *others = times
    return graphpp.Costs((graphpp.StageCosts(first[0], 0.0, first[2]), *(graphpp.StageCosts(*each) for each in others)))
