"""The private names of torch that capture stands on; no other file of `graphpp/` or `passes/` touches one.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._functorch.aot_autograd.aot_export_joint_with_descriptors`: the joint trace of a module
- `torch._functorch._aot_autograd.descriptors`: what an input or output of that trace is
- `torch._subclasses.fake_tensor.FakeTensorMode`: tensors with a device and no data
- `torch._logging`: `trace_structured`, artefacts that `TORCH_TRACE` writes and tlparse shows; `_internal.trace_log`,
  which has a handler while a trace is being written
- `torch.amp.autocast_mode._enter_autocast`, `torch.amp.autocast_mode._exit_autocast`, `torch._C._set_grad_enabled`: modes as
  nodes of a graph, as Dynamo writes them
- `torch.autograd._engine_run_backward`: what `autograd.grad`, `backward` and `torch.func.grad` call in the end
- `torch.distributions.Distribution._validate_args`: whether distributions check values
- `torch.fx._lazy_graph_module._use_lazy_graph_module`: graphs are printed to Python when they are run, not at each change
- `torch.utils._pytree`: nested inputs and outputs as flat lists (export's own notion of a structure)
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._functorch import aot_autograd
from torch._functorch._aot_autograd import descriptors
from torch._logging import trace_structured  # type: ignore[attr-defined]
from torch._logging._internal import trace_log
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributions import Distribution
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled

TreeSpec = pytree.TreeSpec
keystr = pytree.keystr
tree_flatten = pytree.tree_flatten
tree_flatten_with_path = pytree.tree_flatten_with_path
tree_map = pytree.tree_map
tree_unflatten = pytree.tree_unflatten

ParamAOTInput = descriptors.ParamAOTInput
BufferAOTInput = descriptors.BufferAOTInput
PlainAOTInput = descriptors.PlainAOTInput
TangentAOTInput = descriptors.TangentAOTInput
PlainAOTOutput = descriptors.PlainAOTOutput
GradAOTOutput = descriptors.GradAOTOutput
InputMutationAOTOutput = descriptors.InputMutationAOTOutput


def fake_mode() -> FakeTensorMode:
    """A new fake mode with its own shape environment; real constants may meet fake tensors in it."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Trace without the two things that cost most beside tracing: garbage collection, and code for graphs in the making."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        if collecting:
            gc.enable()


def fake_like(mode: FakeTensorMode, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A fake tensor on `device` with shape, strides, dtype and needs-grad of `tensor`."""
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def backward_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Call `run` where autograd would run a backward."""
    original = vars(torch.autograd)["_engine_run_backward"]
    vars(torch.autograd)["_engine_run_backward"] = run
    try:
        yield
    finally:
        vars(torch.autograd)["_engine_run_backward"] = original


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Let `torch.distributions` not check the values that they are given."""
    checking = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checking)


@contextlib.contextmanager
def joint_trace(mode: FakeTensorMode, module: nn.Module, args: tuple[Any, ...]) -> Iterator[fx.GraphModule]:
    """Trace `module(*args)` with its backward; inputs and outputs of the graph carry descriptors in `meta['desc']`."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        yield aot_autograd.aot_export_joint_with_descriptors(stack, module, args).graph_module


def tracing() -> bool:
    """Whether a structured trace is being written; asked after a capture, which makes torch find out."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Hand a text to torch's structured trace (read by tlparse); nothing happens when no trace is being written."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload, expect_trace_id=False
    )
