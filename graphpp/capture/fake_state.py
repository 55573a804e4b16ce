"""Replace a model's parameters and buffers by fake tensors during a capture.

Contract: while `fake_state` is open, every parameter and buffer is a fake tensor of the same shape, dtype (`param_dtype` for
floating-point parameters, if given) and requires_grad on the step's device. Tied tensors stay tied; a `DTensor` is replaced by
its local shard. Other threads see the fake tensors too: calling a module of the model or stepping a pipeline there raises
`GraphPPError`. Other uses, such as `state_dict()`, are not refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphpp._torch import aot
from graphpp._torch.this_thread import replaced
from graphpp.errors import GraphPPError
from graphpp.runtime.dtensors import spread_tensor
from graphpp.runtime.fsdp.precision import floating_as


@contextlib.contextmanager
def fake_state(
    model: nn.Module, mode: Any, device: torch.device, param_dtype: torch.dtype | None = None
) -> Iterator[None]:
    fakes: dict[int, torch.Tensor] = {}
    stores: list[dict[str, Any]] = [store for module in model.modules() for store in (module._parameters, module._buffers)]
    originals = [(store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None]
    with _refuse_calls_elsewhere(model):
        for store, name, tensor in originals:
            if id(tensor) not in fakes:
                part, wanted = spread_tensor(tensor), param_dtype if isinstance(tensor, nn.Parameter) else None
                dtype = floating_as(wanted, tensor.dtype)
                fakes[id(tensor)] = aot.fake_like(mode, tensor, device, dtype, part and part.local)
            store[name] = fakes[id(tensor)]
        try:
            yield
        finally:
            for store, name, tensor in originals:
                store[name] = tensor


def refuse_fake_state(modules: Iterable[nn.Module]) -> None:
    """Raise `GraphPPError` if another thread is capturing the model of these modules."""
    stores = [store.values() for module in modules for store in (module._parameters, module._buffers)]
    if any(aot.is_fake(tensor) for tensors in stores for tensor in tensors):
        raise GraphPPError(f"a thread steps a pipeline {_MEANWHILE}")


def _refuse_calls_elsewhere(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    names = {id(module): f"the module {name}" if name else "the model" for name, module in model.named_modules()}
    call = nn.Module.__call__

    def refuse(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) in names:
            raise GraphPPError(f"a thread calls {names[id(module)]} ({type(module).__name__}) {_MEANWHILE}")
        return call(module, *args, **kwargs)

    return replaced(nn.Module, "__call__", call, elsewhere=refuse)


_MEANWHILE = (
    "while another thread captures the same model: until the capture ends, the parameters have no data. Let the thread wait "
    "for the first step of the other pipeline, or give that pipeline a copy of the model."
)
