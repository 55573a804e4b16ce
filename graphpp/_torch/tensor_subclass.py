"""The private names of torch for tensor subclasses: those of users, and one that answers questions about metadata alone.

Checked on torch 2.13.0 and 2.15.0:

- `torch.Tensor._make_subclass`: a subclass instance that shares another tensor's memory
- `torch.utils._python_dispatch._disable_current_modes`: disables fake tensor modes and tracers
- `torch._C.DisableTorchFunctionSubclass`, `torch._C._is_torch_function_enabled`: whether subclasses' `__torch_function__` is on
- `torch._C._disabled_torch_function_impl`, `torch._C._disabled_torch_dispatch_impl`: of classes that override nothing
- `torch._C.TensorBase.grad`, `data`: the properties behind `tensor.grad` and `tensor.data`
- `torch.nn.Module._apply.__code__`: of the function that moves and converts the tensors of a module
- `torch.Tensor._backward_hooks`, `_version`, `_post_accumulate_grad_hooks`, `torch._has_compatible_shallow_copy_type`: metadata
- `torch._subclasses.functional_tensor`: `FunctionalTensor`, `FunctionalTensorMode`: rewrite writes of a trace to new values
- `torch._is_functional_tensor`, `torch._functionalize_has_data_mutation`: whether a tensor is traced so, and was written
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from graphpp._torch import pytree
from graphpp._torch.this_thread import replaced

T = TypeVar("T", bound=torch.Tensor)
WRITES = ("entirely functional graph", "a non-functional tensor", "is no input of the trace")
"""Words in the messages of traces that write into a tensor that is no input."""
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)

_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "is_meta", "ndim", "itemsize", "nbytes", "grad_fn"),
    *("is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "grad_dtype"),
    *("_backward_hooks", "_version", "_post_accumulate_grad_hooks"),
)
_METHODS = (
    *("size", "stride", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_contiguous"),
    *("__len__", "get_device", "requires_grad_"),
)
FACTS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
        *(getattr(torch.Tensor, name) for name in _METHODS),
        torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch._has_compatible_shallow_copy_type),
    }
)
"""Functions that read metadata (shape, layout, dtype, device, requires_grad), and the setter of requires_grad."""
SET_GRAD: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__set__
"""The function behind `tensor.grad = value`."""
GET_GRAD: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__get__
SET_DATA: Callable[..., Any] = vars(torch._C.TensorBase)["data"].__set__
GRADIENT_HABITS = frozenset({nn.Module.zero_grad.__code__, nn.Module._apply.__code__})
"""The code of torch that reads a parameter's gradient to drop or to move it."""
CONVERSIONS: frozenset[Callable[..., Any]] = frozenset(
    getattr(torch.Tensor, name) for name in ("to", "cpu", "cuda", "half", "bfloat16", "float", "double")
)
"""The methods behind `module.to`, `module.cpu` and the like."""


def made(kind: type[T], blank: torch.Tensor, requires_grad: bool) -> T:
    """A tensor of class `kind` like `blank`, made outside of any active tracer."""
    with _disable_current_modes():
        found: T = torch.Tensor._make_subclass(kind, blank, requires_grad)
    return found


def without_subclasses() -> AbstractContextManager[None]:
    found: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found


def overrides(kind: type[torch.Tensor]) -> bool:
    """Whether functions of torch call `kind.__torch_function__`; results of the inherited one are of class `kind`."""
    return kind is not torch.Tensor and kind.__torch_function__ is not torch._C._disabled_torch_function_impl


def subclasses_decide() -> bool:
    enabled: bool = torch._C._is_torch_function_enabled()
    return enabled


def dispatches(kind: type[torch.Tensor]) -> bool:
    """Whether a class computes by a `__torch_dispatch__` of its own, and is none of torch's classes for tracing."""
    own = getattr(kind, "__torch_dispatch__", torch._C._disabled_torch_dispatch_impl)
    return own is not torch._C._disabled_torch_dispatch_impl and not kind.__module__.startswith("torch._subclasses.")


def wraps_tensors(kind: type[torch.Tensor]) -> bool:
    """Whether a class computes by operators on the tensors inside of its objects, which it names (`__tensor_flatten__`)."""
    return dispatches(kind) and hasattr(kind, "__tensor_flatten__")


def constants_functional() -> AbstractContextManager[None]:
    """Let traced code write in place into results of constants, such as `t = self.table * 2; t += 1`.

    Torch rewrites writes into inputs of the trace and into results of inputs. Here each tensor that code takes from elsewhere
    gets torch's wrapper, too, where an operator gets no other tensors. A write into the tensor itself raises.
    """
    from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode  # imports AOT Autograd

    original: Callable[..., Any] = FunctionalTensorMode.__torch_dispatch__
    written = vars(torch)["_functionalize_has_data_mutation"]
    wrappers: list[FunctionalTensor] = []

    def wrapped(leaves: list[Any]) -> list[Any]:
        constants = [type(each) is torch.Tensor and not torch._is_functional_tensor(each) for each in leaves]
        if not any(constants) or any(isinstance(each, FunctionalTensor) for each in leaves):
            return leaves
        made = {id(each): FunctionalTensor.to_functional(each) for each, is_ in zip(leaves, constants, strict=True) if is_}
        wrappers.extend(made.values())
        return [made.get(id(each), each) for each in leaves]

    def dispatch(mode: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        if function not in _LIFTS:  # of a literal; torch wraps their results
            with mode:
                args, kwargs = pytree.tree_unflatten(wrapped(leaves), spec)
        found = original(mode, function, types, args, kwargs)
        if function._schema.is_mutable and any(written(each.elem) for each in wrappers):
            raise RuntimeError(f"{function} writes into a tensor that is no input of the trace")
        return found

    return replaced(FunctionalTensorMode, "__torch_dispatch__", dispatch)
