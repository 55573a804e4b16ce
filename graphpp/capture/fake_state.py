"""Replace a model's parameters and buffers by fake tensors during a capture.

Contract: while `fake_state` is open, every parameter and buffer is a fake tensor of the same shape, dtype (`param_dtype` for
floating-point parameters, if given) and requires_grad on the step's device. Tied tensors stay tied; a `DTensor` is replaced by
its local shard, and a tensor whose class computes itself by None (`tensor_objects.py`). Other threads see the fake tensors too:
calling a module of the model or stepping a pipeline there raises `GraphPPError`. Other uses, such as `state_dict()`, are not
refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from graphpp._torch import aot
from graphpp._torch.this_thread import replaced
from graphpp.capture.tensor_objects import TensorObjects, computes_itself, places_of
from graphpp.errors import GraphPPError
from graphpp.runtime.dtensors import spread_tensor
from graphpp.runtime.fsdp.precision import floating_as

_CAPTURED: set[int] = set()  # the modules, by `id`, of models under capture


@contextlib.contextmanager
def fake_state(
    model: nn.Module, mode: Any, device: torch.device, param_dtype: torch.dtype | None = None
) -> Iterator[TensorObjects]:
    fakes: dict[int, torch.Tensor | None] = {}
    places, modules = places_of(model), set(map(id, model.modules()))
    with _refuse_calls_elsewhere(model):
        for place in places:
            if id(place.tensor) not in fakes:
                fakes[id(place.tensor)] = None if computes_itself(place) else _fake_of(place.tensor, mode, device, param_dtype)
        for place in places:
            place.store[place.name] = fakes[id(place.tensor)]
        _CAPTURED.update(modules)
        try:
            yield TensorObjects(places)
        finally:
            _CAPTURED.difference_update(modules)
            for place in places:
                place.store[place.name] = place.tensor


def _fake_of(tensor: torch.Tensor, mode: Any, device: torch.device, param_dtype: torch.dtype | None) -> torch.Tensor:
    part, wanted = spread_tensor(tensor), param_dtype if isinstance(tensor, nn.Parameter) else None
    return aot.fake_like(mode, tensor, device, floating_as(wanted, tensor.dtype), part and part.local)


def refuse_fake_state(modules: Iterable[nn.Module]) -> None:
    """Raise `GraphPPError` if another thread is capturing the model of these modules."""
    if _CAPTURED and not _CAPTURED.isdisjoint(map(id, modules)):
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
