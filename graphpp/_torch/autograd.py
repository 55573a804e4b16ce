"""The private names of torch for custom autograd Functions, activation checkpoints and backward calls.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._functorch.autograd_function`: the class `ApplyTemplate`, by name
- `torch._C._SetExcludeDispatchKeyGuard`, `torch._C.DispatchKey`: admits or excludes one dispatch key
- `torch._dynamo.symbolic_convert`: the file whose frames are on the stack while Dynamo reads code
- `torch.autograd._engine_run_backward`: called by `autograd.grad`, `backward` and `torch.func.grad`
- `torch._higher_order_ops`: the folder of the operators that differentiate their bodies by autograd
- `torch.utils.checkpoint`: `_checkpoint_hook`, the context around a checkpointed forward; `_CachingTorchDispatchMode`, which
  calls the policy of a selective checkpoint; `_is_compiling`, `_get_debug_context_and_cb`, `SAC_IGNORED_OPS`
- `torch.autograd.function.FunctionMeta`, `torch.autograd.Function._backward_cls`: attributes that `Function.apply` reads
- `torch.autograd._profiler_enabled`: whether a profiler records named ranges
- `torch.Tensor._post_accumulate_grad_hooks`: called with a parameter when its gradient is complete
- `torch.nn.modules.module`: `_global_forward_hooks_with_kwargs`: which hooks on all module calls take keyword arguments
"""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function
from torch.nn.modules import module
from torch.utils import checkpoint

from graphpp._torch.this_thread import InThisThread, replaced

Context = contextlib.AbstractContextManager[None]
profiler_enabled = _profiler_enabled

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_HERE = os.path.join(os.path.dirname(__file__), "")
_HIGHER_ORDER = os.path.join("torch", "_higher_order_ops", "")
_READER = os.path.join("torch", "_dynamo", "symbolic_convert.py")
# Functions of torch itself that change no gradient, or that implement registered and higher-order operators, which export keeps
KEPT_FUNCTIONS = (
    "torch._library.", "torch._higher_order_ops.", "torch._functorch.", "torch.utils.checkpoint",
    "torch._dynamo._trace_wrapped_higher_order_op",  # an index in a mask_mod or score_mod
)  # fmt: skip
FUNCTION_OF_A_REGION = "ApplyTemplate"  # Dynamo's replacement of a custom Function inside torch.cond and the like
_FunctionMeta = torch.autograd.function.FunctionMeta
UNSELECTED = checkpoint.SAC_IGNORED_OPS  # operators for which a selective checkpoint does not call its policy


@contextlib.contextmanager
def as_outside_kernels() -> Iterator[None]:
    """Admit, inside a kernel, the dispatch keys of autograd, by which torch decomposes composite operators (`reshape`).

    Without the keys, a tensor subclass would get composite operators that it never gets in eager.
    """
    key, admit = torch._C.DispatchKey, torch._C._SetExcludeDispatchKeyGuard
    with admit(key.AutogradFunctionality, False), admit(key.ADInplaceOrView, False):
        yield


def profiled(name: str) -> contextlib.AbstractContextManager[object]:
    """A range `graphpp::name` of a profiler (`torch.profiler`, `emit_nvtx`); without a profiler, nothing."""
    return record_function(f"graphpp::{name}") if profiler_enabled() else contextlib.nullcontext()


def finds_nan() -> bool:
    """Whether `torch.autograd.detect_anomaly` is on and looks for NaN."""
    return torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._post_accumulate_grad_hooks)


def with_gradient_hooks(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of the tensors with hooks of `register_post_accumulate_grad_hook`."""
    return frozenset([name for name, tensor in tensors.items() if tensor._post_accumulate_grad_hooks])


def call_gradient_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Call the post-accumulate hooks of the parameters that have a gradient."""
    for parameter in parameters:
        if parameter.grad is not None and has_gradient_hooks(parameter):
            for hook in list(parameter._post_accumulate_grad_hooks.values()):
                hook(parameter)


def backward_replaced(run: Callable[..., Any]) -> Context:
    """Replace autograd's backward by `run` for user code; operators such as `scan` still differentiate their bodies."""
    original: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]

    def backward(*args: Any, **kwargs: Any) -> Any:
        return (original if _body_is_differentiated() else run)(*args, **kwargs)

    return replaced(torch.autograd, "_engine_run_backward", backward)


def _body_is_differentiated() -> bool:
    """Whether a higher-order operator asked for the backward: its frame is on the stack before any frame outside torch."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    others = (file for file in files if not file.startswith(_HERE))
    innermost = next((file for file in others if _HIGHER_ORDER in file or not file.startswith(_TORCH)), "")
    return _HIGHER_ORDER in innermost


class _Lookup:
    """Overrides attribute `name` of every `autograd.Function` in this thread; values set meanwhile stay set afterwards."""

    def __init__(self, name: str, answer: Callable[[type, Any], Any]) -> None:
        self._name, self._answer, self._here = name, answer, InThisThread()
        self._set: dict[type, Any] = {}

    def __get__(self, function: type, meta: type) -> Any:
        own = self._own(function)
        return self._answer(function, own) if self._here else own

    def _own(self, function: type) -> Any:
        if function in self._set:
            return self._set[function]
        found = next(vars(base)[self._name] for base in function.__mro__ if self._name in vars(base))
        return found.__get__(None, function) if isinstance(found, staticmethod) else found

    def __set__(self, function: type, value: Any) -> None:
        self._set[function] = value

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        setattr(_FunctionMeta, self._name, self)
        try:
            yield
        finally:
            delattr(_FunctionMeta, self._name)
            for function, value in self._set.items():
                setattr(function, self._name, value)


@contextlib.contextmanager
def module_calls_watched(leave: Callable[[nn.Module, Any, Any, Any], None]) -> Iterator[None]:
    """Call `leave(module, args, kwargs, output)` at the end of every module call of the process.

    `RemovableHandle.remove` leaves an entry of the hook behind, because of which `torch.compile` would warn of global hooks.
    """
    handle = module.register_module_forward_hook(leave, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
        entries = module._global_forward_hooks_with_kwargs
        entries.pop(handle.id, None)


@contextlib.contextmanager
def functions_watched(begun: Callable[[type], None], forward: Callable[[type, Any], Any]) -> Iterator[None]:
    """Call `begun(function)` when an `autograd.Function` is applied, and run `forward(function, its forward)` as its forward.

    Models often alias `apply` (`f = MyFunction.apply`), so it cannot be replaced. But each call reads `_backward_cls` and
    `forward` from the class, where the metaclass can override them.
    """

    def backward_cls(function: type, own: Any) -> Any:
        begun(function)
        return own

    with _Lookup("_backward_cls", backward_cls).open(), _Lookup("forward", forward).open():
        yield


@contextlib.contextmanager
def checkpoints_replaced(
    run: Callable[..., Any],
    call: Callable[[], Context],
    select: Callable[[Callable[..., Any]], None],
) -> Iterator[None]:
    """Make `torch.utils.checkpoint` save all values that autograd saves, and report the user's choices.

    `run(function, preserve_rng_state, *args)` runs a reentrant checkpoint. `call()` is the context around any other
    checkpoint's forward; a selective one calls `select(policy)` inside.
    """
    caching = checkpoint._CachingTorchDispatchMode
    replacements: tuple[tuple[Any, str, Any], ...] = (
        (checkpoint.CheckpointFunction, "apply", staticmethod(run)),
        (checkpoint, "_checkpoint_hook", lambda frame: call()),
        (checkpoint, "_is_compiling", lambda *_: False),
        (checkpoint, "_get_debug_context_and_cb", lambda: (checkpoint.noop_context_fn, None)),
        (caching, "__enter__", lambda mode: select(mode.policy_fn)),
        (caching, "__exit__", lambda mode, *_: None),
    )
    with contextlib.ExitStack() as stack:
        for owner, name, replacement in replacements:
            stack.enter_context(replaced(owner, name, replacement))
        yield


def selective_context(output: Any) -> checkpoint.SelectiveCheckpointContext:
    """The first argument of a selective checkpoint's policy; the operator and its arguments follow."""
    context = checkpoint.SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output  # torch 2.11 has no such attribute
    return context


def dynamo_is_reading() -> bool:
    """Whether Dynamo, which traces the branches of `torch.cond` and similar operators, is on the call stack."""
    return any(frame.f_code.co_filename.endswith(_READER) for frame, _ in traceback.walk_stack(None))
