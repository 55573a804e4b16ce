"""The private names of torch by which a tensor subclass answers some questions and refuses all else.

Checked on torch 2.13.0 and 2.15.0:

- `torch.Tensor._make_subclass`: a tensor of a subclass with the memory of another tensor
- `torch.utils._python_dispatch._disable_current_modes`: a context without fake tensors and tracers
- `torch._C.DisableTorchFunctionSubclass`: a context in which `__torch_function__` of subclasses is not called
- `torch._C.TensorBase.grad`: the property behind `tensor.grad`
- `torch.Tensor._backward_hooks`, `_version`, `_post_accumulate_grad_hooks`: facts of a tensor that are no values
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

T = TypeVar("T", bound=torch.Tensor)

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
        *(torch.numel, torch.is_floating_point, torch.is_complex),
    }
)
"""The functions that tell shape, layout, dtype and place of a tensor, and whether it needs a gradient."""
SET_GRAD: Callable[..., Any] = vars(torch._C.TensorBase)["grad"].__set__
"""The function behind `tensor.grad = value`."""


def made(kind: type[T], blank: torch.Tensor, requires_grad: bool) -> T:
    """A tensor of the class `kind` like `blank`, which no tracer that is active notices."""
    with _disable_current_modes():
        found: T = torch.Tensor._make_subclass(kind, blank, requires_grad)
    return found


def without_subclasses() -> AbstractContextManager[None]:
    """A context in which functions of torch take tensors of subclasses as plain tensors."""
    found: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return found
