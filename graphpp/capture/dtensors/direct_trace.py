"""Trace model, loss and backward directly, without an export before: the route for models with `DTensor` parameters.

Contract
--------
- The graph is that of AOT Autograd over the model's own code, whose autograd gives `DTensor`s their gradients. Custom
  Functions, `no_grad` and autocast within the model act as in eager. An autocast around the step is entered by the forward
  alone.
- The same refusals as during an export hold while the forward runs, and the same facts are learned from the last forward.
- Shapes are those of the example. `CaptureError` explains every error of the trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from graphpp._torch import aot
from graphpp.capture.activation_checkpoints import CheckpointedCalls, record_checkpoints
from graphpp.capture.attributes.exported import Exported, TraceResults
from graphpp.capture.attributes.numbers import NumberUpdate
from graphpp.capture.autograd_functions import FunctionCalls
from graphpp.capture.dtensors.local_shards import SpreadTensors
from graphpp.capture.dtensors.module_stacks import note_module_calls
from graphpp.capture.eager_branches import TracingQueries, answer_as_eager
from graphpp.capture.explain_errors import explain_errors
from graphpp.capture.outside_state import refuse_generators, refuse_outside_state
from graphpp.capture.refusals import refuse_during_trace
from graphpp.capture.source_lines import calling_line
from graphpp.errors import CaptureError


class Step(Protocol):
    """Model and loss as one module, which notes facts while its forward runs."""

    found: TraceResults

    def begin(self, updates: Iterable[NumberUpdate]) -> None:
        """Prepare a forward with these numbers in attributes."""


def direct_trace(
    step: Any,
    spread: SpreadTensors,
    inputs: tuple[torch.Tensor, ...],
    mode: Any,
    device: torch.device,
    updates: Iterable[NumberUpdate],
) -> Exported:
    """The joint graph of a step on fake `inputs`, with torch's descriptors, in the place of an export.

    `step`: an `nn.Module` that is a `Step`; `spread`: the `DTensor`s of its model, in whose places are local shards now. As in
    an export, the branches count that the model takes in eager or, if they cannot be traced, the branches that the model has
    for a trace. Raises `CaptureError`.
    """
    queries = TracingQueries()
    try:
        return _traced(step, spread, inputs, mode, device, updates, lambda: answer_as_eager(queries))
    except CaptureError:
        if not queries.any:
            raise
    return _traced(step, spread, inputs, mode, device, updates, aot.as_under_export)


def _traced(
    step: Any,
    spread: SpreadTensors,
    inputs: tuple[torch.Tensor, ...],
    mode: Any,
    device: torch.device,
    updates: Iterable[NumberUpdate],
    answering: Callable[[], contextlib.AbstractContextManager[None]],
) -> Exported:
    """The joint graph; `answering`: the context in which the model learns whether it is being traced."""
    module: nn.Module = step
    autocast = torch.autocast(device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
    checkpoints = CheckpointedCalls()

    @contextlib.contextmanager
    def forward() -> Iterator[None]:
        step.begin(updates)  # the trace runs the forward more than once, and the last run counts
        step.found.checkpoints = checkpoints
        patches = record_checkpoints(checkpoints), refuse_during_trace(), refuse_outside_state()
        with contextlib.ExitStack() as stack, spread.read_as_dtensors():
            for each in (*patches, answering(), autocast, aot.LinesNoted(calling_line)):
                stack.enter_context(each)
            yield

    without = torch.autocast(device.type, enabled=False)
    with explain_errors(), without, note_module_calls(module, forward), aot.joint_trace(mode, module, inputs) as traced:
        refuse_generators(traced.graph)
    return Exported(traced, FunctionCalls(), step.found, inputs)
