"""The private names of torch that an eager forward passes through: custom Functions, activation checkpoints, backward calls.

Checked on torch 2.11.0, 2.13.0 and 2.15.0:

- `torch._functorch.autograd_function`: the class `ApplyTemplate`, by name
- `torch._dynamo.symbolic_convert`: the file whose frames are on the stack while Dynamo reads code
- `torch.autograd._engine_run_backward`: the function that `autograd.grad`, `backward` and
  `torch.func.grad` call; `torch._higher_order_ops`: the folder of the operators that differentiate their bodies with it
- `torch.utils.checkpoint`: `_checkpoint_hook`, the context around the forward of a checkpointed call;
  `_CachingTorchDispatchMode`, which asks the policy of a selective checkpoint; `_is_compiling`, `_get_debug_context_and_cb`,
  `SAC_IGNORED_OPS`
- `torch.autograd.function.FunctionMeta`, `torch.autograd.Function._backward_cls`: the attributes of a Function that
  `apply` reads
- `torch.Tensor._post_accumulate_grad_hooks`: the hooks that autograd calls with a parameter whose gradient is complete
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
from torch.nn.modules import module
from torch.utils import checkpoint

from graphpp._torch.this_thread import InThisThread, replaced

Context = contextlib.AbstractContextManager[None]

_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_HERE = os.path.join(os.path.dirname(__file__), "")
_HIGHER_ORDER = os.path.join("torch", "_higher_order_ops", "")
_READER = os.path.join("torch", "_dynamo", "symbolic_convert.py")
# Functions of torch itself that change no gradient, or implement registered and higher-order operators, which export keeps.
KEPT_FUNCTIONS = ("torch._library.", "torch._higher_order_ops.", "torch._functorch.", "torch.utils.checkpoint")
FUNCTION_OF_A_REGION = "ApplyTemplate"  # Dynamo's stand-in for a custom Function in the branch of torch.cond and the like
_FunctionMeta = torch.autograd.function.FunctionMeta
UNSELECTED = checkpoint.SAC_IGNORED_OPS  # operators for which a selective checkpoint does not call its policy


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Whether hooks of `register_post_accumulate_grad_hook` stand on a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


def with_gradient_hooks(tensors: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of the tensors on which such hooks stand."""
    return frozenset([name for name, tensor in tensors.items() if tensor._post_accumulate_grad_hooks])


def call_gradient_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Call the hooks of `register_post_accumulate_grad_hook` of the parameters that have a gradient."""
    for parameter in parameters:
        if parameter.grad is not None and has_gradient_hooks(parameter):
            for hook in list(parameter._post_accumulate_grad_hooks.values()):
                hook(parameter)


def backward_replaced(run: Callable[..., Any]) -> Context:
    """A context in which `run` is called where the user's code would have autograd run a backward.

    Higher-order operators with a body, `scan` for instance, trace the body's own backward by running autograd on it.
    """
    original: Callable[..., Any] = vars(torch.autograd)["_engine_run_backward"]

    def backward(*args: Any, **kwargs: Any) -> Any:
        return (original if _body_is_differentiated() else run)(*args, **kwargs)

    return replaced(torch.autograd, "_engine_run_backward", backward)


def _body_is_differentiated() -> bool:
    """Whether a higher-order operator asks for a backward: it is on the stack before any file outside of torch."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    others = (file for file in files if not file.startswith(_HERE))
    innermost = next((file for file in others if _HIGHER_ORDER in file or not file.startswith(_TORCH)), "")
    return _HIGHER_ORDER in innermost


class _Lookup:
    """Answers, in this thread, the attribute `name` of every `autograd.Function`; other threads get the attribute itself.

    Values set inside the context remain set afterwards.
    """

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
        """The context in which the attribute is answered."""
        setattr(_FunctionMeta, self._name, self)
        try:
            yield
        finally:
            delattr(_FunctionMeta, self._name)
            for function, value in self._set.items():
                setattr(function, self._name, value)


@contextlib.contextmanager
def module_calls_watched(leave: Callable[[nn.Module, Any, Any, Any], None]) -> Iterator[None]:
    """A context in which `leave(module, args, kwargs, output)` is called at the end of every module call of the process.

    A handle that removes such a hook leaves its entry among those with keyword arguments. From then on every call of a module
    of `torch.compile` would warn of global hooks, so the entry goes here.
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
    """A context that calls `begun(function)` when an `autograd.Function` is applied, and runs `forward(function, its forward)`.

    Models often keep `apply` under another name (`f = MyFunction.apply`), so `apply` cannot be replaced. But torch reads
    `_backward_cls` and `forward` from the class at each application, and the metaclass answers first.
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
    """A context in which `torch.utils.checkpoint` saves all values that autograd saves, and reports the user's choices.

    `run(function, preserve_rng_state, *args)` runs a reentrant checkpoint. `call()` is the context around the forward of any
    other checkpoint, in which `select(policy)` is called if it is a selective one.
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
    """The first argument of a selective checkpoint's policy, before an operator and its arguments."""
    context = checkpoint.SelectiveCheckpointContext(is_recompute=False)
    context.op_output = output  # torch 2.11 has no such attribute
    return context


def dynamo_is_reading() -> bool:
    """Whether Dynamo, which reads the branches of `torch.cond` and the like, caused the present call."""
    return any(frame.f_code.co_filename.endswith(_READER) for frame, _ in traceback.walk_stack(None))
