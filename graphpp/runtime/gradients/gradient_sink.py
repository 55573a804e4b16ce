"""Gradient sinks: a program hands its gradients to a sink while it runs.

- A program with gradients runs as `run(arguments, sink)`. It hands each gradient to the sink as soon as no other operation of
  the program reads the gradient, and puts the sink's answer into the gradient's place among its results. The text of a program
  calls the sink `take`.
- `sink(index, value)` hands over a tensor. `sink.matmul(index, a, b, layout)` hands over the factors of a gradient that is a
  matrix product (`gemm_accumulation.py`). `index` is the gradient's position among the program's results.
- The sinks: `MicrobatchSink` (`accumulate.py`) adds to a stage's sums; `WovenSink` (`runtime/task.py`) forwards to the sinks of
  the overlapped programs; `RecordingSink` (`backends/record_programs.py`) keeps gradients for a CUDA graph; `ReturningSink`
  leaves every gradient among the results.
"""

from __future__ import annotations

from typing import Protocol

import torch

from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout


class GradientSink(Protocol):
    """Receives the gradients of one run of a program."""

    def __call__(self, index: int, value: torch.Tensor) -> torch.Tensor | None:
        """Receive a gradient; the answer takes its place among the results: None if the sink keeps the gradient."""

    def matmul(
        self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None
    ) -> torch.Tensor | None:
        """Receive the gradient `a @ b` by its factors; the answer takes its place among the results."""


class ReturningSink:
    """Returns every gradient as a result. (Programs contain this class as text, so it needs nothing but torch.)"""

    def __call__(self, index, value):  # type: ignore[no-untyped-def]
        """Return the gradient."""
        return value

    def matmul(self, index, a, b, layout=None):  # type: ignore[no-untyped-def]
        """Return the gradient `a @ b`; `layout`: the gradient's shape, and shape and strides of the product within it."""
        value = torch.matmul(a, b)
        if layout is None:
            return value
        shape, inner, strides = layout
        gradient = value.new_empty(shape)
        gradient.as_strided(inner, strides).copy_(value)
        return gradient
