"""The private names of torch for tracing a model: fake tensors, export and the joint trace, modes, node metadata.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._functorch.aot_autograd.aot_export_joint_with_descriptors`: the joint trace of a module
- `torch._decomp.decompositions`: `select_one_layer_lstm_function`, `one_layer_lstm`: decompositions of an LSTM layer
- `torch._export.utils._compiling_state_context`: a context in which `torch.compiler.is_exporting()` is true
- `torch.export._trace`: prints the graph of a trace that fails
- `torch._higher_order_ops.effects`: `_get_effect`, `_register_effectful_op`: the operators traced with an effect token
- `torch.fx.node._side_effectful_functions`: the operators that dead code elimination keeps
- `torch._subclasses.fake_tensor`: `FakeTensorMode`, `FakeTensor`; the logger `torch._subclasses`, by name
- `torch.nn.Module._call_impl`: calls a module with its hooks
- `torch._logging`: `trace_structured`, which writes artefacts for `TORCH_TRACE`; `_internal.trace_log`, its logger
- `torch.amp.autocast_mode._enter_autocast`, `torch.amp.autocast_mode._exit_autocast`, `torch._C._set_grad_enabled`
- `torch.distributions.Distribution._validate_args`: whether distributions check arguments
- `torch.fx._lazy_graph_module`: `_use_lazy_graph_module`, `_make_graph_module`: Python code is generated at the first run
- `torch._ops`: `OperatorBase`, `OpOverload`, `HigherOrderOperator`, `OpOverloadPacket`: operator classes
- `torch.fx.traceback`: `annotate`, `preserve_node_meta`, `current_meta`: metadata that traced nodes inherit
- `torch.utils._python_dispatch`: `TorchDispatchMode`, which observes the operators of a run; `_disable_current_modes`
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
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from graphpp._torch import pytree
from graphpp._torch.tensor_subclass import constants_functional
from graphpp._torch.this_thread import replaced, uncollected

_STACK = "nn_module_stack"
FAKE_LOG = "torch._subclasses"  # logs failures on fake tensors

Context = contextlib.AbstractContextManager[None]

enter_autocast = torch.amp.autocast_mode._enter_autocast
exit_autocast = torch.amp.autocast_mode._exit_autocast
set_grad_enabled = torch._C._set_grad_enabled

DispatchMode = TorchDispatchMode
no_modes = _disable_current_modes
HigherOrderOperator = torch._ops.HigherOrderOperator
Operator = torch._ops.OperatorBase
OperatorPacket = torch._ops.OpOverloadPacket


def fake_mode() -> FakeTensorMode:
    """A new fake mode with its own shape environment; operators may mix real constants and fake tensors."""
    # Dynamo and sympy take 2 s to import: the first capture imports them, before it patches torch.
    with uncollected():  # garbage collection would take a third of the import time
        from torch._functorch import aot_autograd  # noqa: F401
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def shapes_mode() -> FakeTensorMode:
    """A new fake mode without a shape environment, for plain sizes only."""
    with uncollected():
        return FakeTensorMode(shape_env=None, allow_non_fake_inputs=True)


def as_under_export() -> contextlib.AbstractContextManager[None]:
    """Within this context `torch.compiler.is_exporting()` is true."""
    from torch._export.utils import _compiling_state_context  # sympy comes with it

    return _compiling_state_context()


@contextlib.contextmanager
def failing_quietly() -> Iterator[None]:
    """Within this context `torch.export` does not print the graph of a trace that fails."""
    from torch.export import _trace

    vars(_trace)["print"] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(_trace).pop("print", None)


def graph_module(held: nn.Module | dict[str, Any], graph: fx.Graph) -> fx.GraphModule:
    """A `GraphModule` of `graph` with attributes from `held`; inside `quick`, its code is generated at the first run."""
    module: fx.GraphModule = _make_graph_module(held, graph)
    return module


def with_bodies(graph: fx.Graph) -> fx.GraphModule:
    """A `GraphModule` of `graph` with the sub-graphs of its higher-order operators."""
    return fx.GraphModule({str(node.target): node.meta["held"] for node in graph.find_nodes(op="get_attr")}, graph)


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Speed up tracing and passes: no garbage collection, lazy code generation. Process-wide, so one thread at a time."""
    with uncollected(), _use_lazy_graph_module(True):
        yield


def fake_like(
    mode: FakeTensorMode,
    tensor: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None = None,
    part: torch.Tensor | None = None,
) -> torch.Tensor:
    """A fake tensor with `tensor`'s requires_grad, its dtype unless given, and shape and strides of `part` or `tensor`."""
    shaped = tensor if part is None else part
    with mode:
        fake = torch.empty_strided(shaped.shape, shaped.stride(), dtype=dtype or tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


def is_fake(tensor: torch.Tensor | None) -> bool:
    return isinstance(tensor, FakeTensor)


@contextlib.contextmanager
def regions_replaced(run: Callable[..., Any]) -> Iterator[None]:
    """Call `run` in place of every operator with a body, and of `torch.compile`, by which torch traces such bodies."""
    with replaced(HigherOrderOperator, "__call__", run), replaced(torch, "compile", run):
        yield


def is_pure(function: Any) -> bool:
    """Whether an operator neither writes into its arguments nor draws random numbers."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    return not function._schema.is_mutable and torch.Tag.nondeterministic_seeded not in function.tags


def rounds(value: Any) -> bool:
    """Whether a value is rounded and its dtype has arithmetic (float8 and complex32 have none)."""
    if not isinstance(value, torch.Tensor) or value.dtype is torch.complex32:
        return False
    return value.is_complex() or (value.is_floating_point() and value.dtype.itemsize > 1)


def distributions_unchecked() -> Context:
    return replaced(Distribution, "_validate_args", False)


def _lstm_trainable() -> Context:
    """Trace the backward of an LSTM whose weights require gradients; torch checks only the LSTM's input."""
    original: Callable[..., Any] = decompositions.select_one_layer_lstm_function

    def select(*given: Any) -> Any:
        learns = any(value.requires_grad for value in pytree.tree_flatten(given)[0] if isinstance(value, torch.Tensor))
        return decompositions.one_layer_lstm if learns and torch.is_grad_enabled() else original(*given)

    return replaced(decompositions, "select_one_layer_lstm_function", select)


@contextlib.contextmanager
def _check_plain() -> Iterator[None]:
    """Trace the error check of `torch.linalg` without an effect token, and keep it although its result is unused."""
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
    """Trace `module(*args)` with its backward; `meta["desc"]` describes inputs and outputs. The fake mode is active inside."""
    from torch._functorch import aot_autograd  # `fake_mode` has loaded it

    with _lstm_trainable(), _check_plain(), constants_functional(), contextlib.ExitStack() as stack:
        stack.enter_context(mode)
        yield aot_autograd.aot_export_joint_with_descriptors(stack, module, args).graph_module


@contextlib.contextmanager
def traced_before(mode: FakeTensorMode, traced: fx.GraphModule) -> Iterator[fx.GraphModule]:
    """Same context as `joint_trace`, for the graph of an earlier `joint_trace`."""
    with mode:
        yield traced


@contextlib.contextmanager
def notes_kept() -> Iterator[None]:
    """Within this context traced nodes inherit the current metadata."""
    with traceback.preserve_node_meta():
        yield


@contextlib.contextmanager
def calls_within(around: Callable[[nn.Module], Context]) -> Iterator[None]:
    """Run each module call and its hooks within `around(module)`. (Tracers would undo a replaced `nn.Module.__call__`.)"""
    original: Callable[..., Any] = nn.Module._call_impl

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with around(module):
            return original(module, *args, **kwargs)

    with replaced(nn.Module, "_call_impl", call):
        yield


def answered(answer: Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any]], Any]) -> Context:
    """Within this context a module call, with its hooks, gives `answer(module, args, kwargs, call)`."""
    original: Callable[..., Any] = nn.Module._call_impl

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return answer(module, args, kwargs, original)

    return replaced(nn.Module, "_call_impl", call)


class LinesNoted(TorchFunctionMode):
    """Inside `notes_kept`, sets the stack trace of every traced node to the source line that `line` returns."""

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self._line = line

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traceback.current_meta["stack_trace"] = self._line()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def within_module(key: str, fqn: str, kind: type) -> Iterator[None]:
    """Inside `notes_kept`, add a module call to the `nn_module_stack` of all traced nodes."""
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
    """Put `note` into `meta["custom"]` of all nodes that export traces, and of nodes traced from these."""
    with traceback.preserve_node_meta(), traceback.annotate(note):
        yield


def tracing() -> bool:
    """Whether a structured trace is being written. Torch sets up its trace logging only during the first capture."""
    return bool(trace_log.handlers)


def trace_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add a text to torch's structured trace (for tlparse), if one is being written."""
    trace_structured(
        "artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=payload, expect_trace_id=False
    )
