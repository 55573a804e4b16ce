"""The private names of torch for tracing a model: fake tensors, export and the joint trace, modes, notes on nodes.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._functorch.aot_autograd.aot_export_joint_with_descriptors`: the joint trace of a module
- `torch._decomp.decompositions`: `select_one_layer_lstm_function`, `one_layer_lstm`: the operators as which an
  LSTM layer is traced
- `torch._export.utils._compiling_state_context`: a context in which `torch.compiler.is_exporting()` is true
- `torch._higher_order_ops.effects`: `_get_effect`, `_register_effectful_op`; `torch.fx.node._side_effectful_functions`:
  which operators are traced with an effect token, and which a trace keeps although no operation reads them
- `torch._subclasses.fake_tensor`: `FakeTensorMode`, `FakeTensor`: tensors with a device and no data
- the logger `torch._subclasses`, by name
- `torch.nn.Module._call_impl`: every call of a module, with the module's hooks
- `torch._logging`: `trace_structured`, which writes artefacts for `TORCH_TRACE` and tlparse; `_internal.trace_log`,
  which has a handler while a trace is being written
- `torch.amp.autocast_mode._enter_autocast`, `torch.amp.autocast_mode._exit_autocast`, `torch._C._set_grad_enabled`: modes as
  nodes of a graph, as Dynamo writes them
- `torch.distributions.Distribution._validate_args`: whether distributions check values
- `torch.fx._lazy_graph_module`: `_use_lazy_graph_module`, `_make_graph_module`: a graph's Python code is made when it runs,
  not at each change
- `torch._ops`: `OperatorBase`, `HigherOrderOperator`, `OpOverloadPacket`: the classes of the operators that
  graphs call
- `torch.fx.traceback`: `annotate`, `preserve_node_meta`, `current_meta`: a note on nodes traced inside a context, which a
  second trace keeps
- `torch.utils._python_dispatch.TorchDispatchMode`: sees the operators of an eager run
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch._decomp import decompositions
from torch._higher_order_ops import effects
from torch._logging import trace_structured  # type: ignore[attr-defined]
from torch._logging._internal import trace_log
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributions import Distribution
from torch.fx import traceback
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphpp._torch import pytree
from graphpp._torch.this_thread import replaced, uncollected

_STACK = "nn_module_stack"
FAKE_LOG = "torch._subclasses"  # logs failures on fake tensors

Context = contextlib.AbstractContextManager[None]

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled

DispatchMode = TorchDispatchMode
HigherOrderOperator = torch._ops.HigherOrderOperator
Operator = torch._ops.OperatorBase
OperatorPacket = torch._ops.OpOverloadPacket


def fake_mode() -> FakeTensorMode:
    """A new fake mode with its own shape environment; operators may mix real constants and fake tensors."""
    # Dynamo and sympy take 2 s to import: the first capture pays, not `import graphpp`, and before it patches any of torch.
    with uncollected():  # collections would take a third of the time to load thousands of functions
        from torch._functorch import aot_autograd  # noqa: F401
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def shapes_mode() -> FakeTensorMode:
    """A new fake mode for tensors of plain sizes, on which nothing is traced; it loads Dynamo, as every mode does, alone."""
    with uncollected():
        return FakeTensorMode(shape_env=None, allow_non_fake_inputs=True)


def as_under_export() -> contextlib.AbstractContextManager[None]:
    """A context in which `torch.compiler` answers code as during an export."""
    from torch._export.utils import _compiling_state_context  # sympy comes with it

    return _compiling_state_context()


def graph_module(held: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A module with this graph and the attributes `held`, or those of `held`; within `quick`, its code is made later."""
    module: fx.GraphModule = _make_graph_module(held, graph)
    return module


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """A context for tracing and passes, without garbage collection and without Python code of unfinished graphs: both are slow.

    One thread at a time is in the context, for both are switched off for the whole process.
    """
    with uncollected(), _use_lazy_graph_module(True):
        yield


def fake_like(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    part: torch.Tensor | None = None,
) -> torch.Tensor:
    """A fake tensor on `device` with shape, strides and needs-grad of `tensor`, and of its dtype or another one.

    `part`: a part of the tensor, whose shape and strides count instead.
    """
    shaped = tensor if part is None else part
    with mode:
        fake = torch.empty_strided(shaped.shape, shaped.stride(), dtype=dtype or tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def is_fake(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor has a device and no data."""
    return isinstance(tensor, FakeTensor)


def distributions_unchecked() -> Context:
    """A context in which `torch.distributions` do not check their arguments."""
    return replaced(Distribution, "_validate_args", False)


def _lstm_trainable() -> Context:
    """A context in which an LSTM with trained weights is traced with a backward; torch decides by the LSTM's input alone."""
    original: Callable[..., Any] = decompositions.select_one_layer_lstm_function

    def select(*given: Any) -> Any:
        learns = any(value.requires_grad for value in pytree.tree_flatten(given)[0] if isinstance(value, torch.Tensor))
        return decompositions.one_layer_lstm if learns and torch.is_grad_enabled() else original(*given)

    return replaced(decompositions, "select_one_layer_lstm_function", select)


@contextlib.contextmanager
def _check_plain() -> Iterator[None]:
    """A context in which `torch.linalg`'s error check is traced as an operator without a token, kept although unread."""
    check, kept = torch.ops.aten._linalg_check_errors.default, fx.node._side_effectful_functions
    effect, added = effects._get_effect(check), check not in kept
    effects._register_effectful_op(check, None)
    kept.add(check)
    try:
        yield
    finally:
        effects._register_effectful_op(check, effect)
        if added:
            kept.discard(check)


@contextlib.contextmanager
def joint_trace(mode: FakeTensorMode, module: nn.Module, args: tuple[Any, ...]) -> Iterator[fx.GraphModule]:
    """Trace `module(*args)` with its backward; the graph's inputs and outputs have descriptors in `meta['desc']`.

    The fake mode is active inside the context.
    """
    from torch._functorch import aot_autograd  # `fake_mode` has loaded it

    with _lstm_trainable(), _check_plain(), contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        yield aot_autograd.aot_export_joint_with_descriptors(stack, module, args).graph_module


@contextlib.contextmanager
def traced_before(mode: FakeTensorMode, traced: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """The context of `joint_trace`, around a graph that an earlier `joint_trace` has made."""
    with mode:
        yield traced


@contextlib.contextmanager
def notes_kept() -> Iterator[None]:
    """A context in which traced nodes get the notes that are current when they are made."""
    with traceback.preserve_node_meta():
        yield


@contextlib.contextmanager
def calls_within(around: Callable[[nn.Module], Context]) -> Iterator[None]:
    """A context in which each module's call, its hooks included, runs within the context `around(module)`.

    Tracers put `nn.Module.__call__` back for themselves, and all calls come to `_call_impl`.
    """
    original: Callable[..., Any] = nn.Module._call_impl

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with around(module):
            return original(module, *args, **kwargs)

    with replaced(nn.Module, "_call_impl", call):
        yield


class LinesNoted(TorchFunctionMode):
    """A mode for `notes_kept`: every traced node gets the line that called torch, as `line` tells, for its stack trace."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self._line = line

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note the line, and call the function."""
        traceback.current_meta["stack_trace"] = self._line()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def within_module(key: str, fqn: str, kind: type) -> Iterator[None]:
    """A context that adds the call of a module to the `nn_module_stack` of all nodes that are traced inside `notes_kept`."""
    before = traceback.current_meta.get(_STACK)
    traceback.current_meta[_STACK] = {**(before or {}), key: (fqn, kind)}
    try:
        yield
    finally:
        if before is None:
            del traceback.current_meta[_STACK]
        else:
            traceback.current_meta[_STACK] = before


@contextlib.contextmanager
def noted(note: dict[str, Any]) -> Iterator[None]:
    """A context that puts the note into `meta["custom"]` of all nodes that export traces, and of nodes traced from these."""
    with traceback.preserve_node_meta(), traceback.annotate(note):
        yield


def tracing() -> bool:
    """Whether a structured trace is being written; known only after a capture has made torch set up its logging."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (for tlparse), if one is being written."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload, expect_trace_id=False
    )
