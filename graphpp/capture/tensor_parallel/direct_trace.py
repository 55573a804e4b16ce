"""Trace model, loss and backward without an export, for models with `DTensor` parameters.

Contract
--------
- AOT Autograd traces the model's own code, whose autograd gives `DTensor`s their gradients. Custom Functions, `no_grad` and
  autocast within the model act as in eager. An autocast around the step applies to the forward only.
- As after an export, every operation has `nn_module_stack`: the module calls around it, including hooks, outermost first, by
  FQN and, from a module's second call on, `@k`.
- Refusals are those of an export. `TraceResults` come from the last forward. Shapes are those of the example.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphpp._torch import aot
from graphpp.capture.activation_checkpoints import CheckpointedCalls, record_checkpoints
from graphpp.capture.attributes.exported import Exported
from graphpp.capture.attributes.numbers import NumberUpdate
from graphpp.capture.autograd_functions import FunctionCalls
from graphpp.capture.eager_branches import Answering
from graphpp.capture.explain_errors import explain_errors
from graphpp.capture.outside_state import refuse_generators, refuse_outside_state
from graphpp.capture.refusals import refuse_during_trace
from graphpp.capture.source_lines import calling_line
from graphpp.capture.tensor_parallel.local_shards import SpreadTensors

Context = contextlib.AbstractContextManager[None]


def direct_trace(
    step: Any,
    spread: SpreadTensors,
    inputs: tuple[torch.Tensor, ...],
    mode: Any,
    device: torch.device,
    updates: Iterable[NumberUpdate],
    answering: Answering,
) -> Exported:
    """The joint graph of a step on fake `inputs`, with torch's descriptors, traced within the context `answering()`.

    `step`: capture's module of model and loss. `spread`: the `DTensor`s of the model, now replaced by local shards. `updates`:
    the numbers with which the call begins. Raises `CaptureError`.
    """
    autocast = torch.autocast(device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type))
    checkpoints = CheckpointedCalls()

    @contextlib.contextmanager
    def forward() -> Iterator[None]:
        step.begin(updates)  # the trace runs the forward several times; the last run counts
        step.found.checkpoints = checkpoints
        patches = record_checkpoints(checkpoints), refuse_during_trace(), refuse_outside_state()
        with contextlib.ExitStack() as stack, spread.read_as_dtensors():
            for each in (*patches, answering(), autocast, aot.LinesNoted(calling_line)):
                stack.enter_context(each)
            yield

    without = torch.autocast(device.type, enabled=False)
    with explain_errors(), without, _noting_calls(step, forward), aot.joint_trace(mode, step, inputs) as traced:
        refuse_generators(traced.graph)
    return Exported(traced, FunctionCalls(), step.found, inputs)


@contextlib.contextmanager
def _noting_calls(root: nn.Module, around: Callable[[], Context]) -> Iterator[None]:
    """Add module calls under `root` to traced nodes. Each call of `root` runs within `around()`."""
    names = {id(module): name for name, module in root.named_modules()}
    calls = Counter[str]()

    @contextlib.contextmanager
    def noted(module: nn.Module) -> Iterator[None]:
        name = names.get(id(module))
        if name is None:
            yield
            return
        if module is root:
            calls.clear()
        key = f"{name}@{calls[name]}" if calls[name] else name
        calls[name] += 1
        with around() if module is root else contextlib.nullcontext(), aot.within_module(key, name, type(module)):
            yield

    with aot.notes_kept(), aot.calls_within(noted):
        yield
