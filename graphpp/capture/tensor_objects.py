"""Run forward and loss on the model's own parameter and buffer objects, while torch traces other tensors in their places.

Contract
--------
- Inside `TensorObjects.in_use` the modules hold the model's own objects: classes, Python attributes and identity (as a key of
  a dict, with `is`) are those of eager. Every call of torch gets the traced tensor of each object among its arguments, and a
  call that returns a traced tensor returns its object. Code that reads memory without calling torch gets the real values;
  `refuse_foreign_leaves` refuses a trained parameter that reached the graph this way.
- A subclass with `__torch_function__` decides about its objects' operations, as in eager. Its results keep the class.
- A frozen tensor of a class with `__torch_dispatch__`, such as quantised weights, has no traced tensor: its class computes with
  the tensors inside, which become constants of the graph. `CaptureError` is raised for such a class that trains.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from graphpp._torch import tensor_subclass
from graphpp._torch.this_thread import replaced
from graphpp.errors import CaptureError
from graphpp.runtime.dtensors import spread_tensor
from graphpp.runtime.released import original

_BLANK = torch.empty((), device="meta")


class Place(NamedTuple):
    """A store of a module, the tensor's name in it, the tensor there, its name in the model, and the user's object."""

    store: dict[str, Any]
    name: str
    tensor: torch.Tensor
    fqn: str
    own: torch.Tensor  # a tensor that other ranks have was exchanged for a stand-in (`runtime/released.py`)


def places_of(model: nn.Module) -> list[Place]:
    named = ((f"{fqn}." if fqn else "", module) for fqn, module in model.named_modules())
    stores = ((prefix, store) for prefix, module in named for store in (module._parameters, module._buffers))
    found = ((store, name, held, prefix + name) for prefix, store in stores for name, held in store.items())
    return [Place(*place, original(place[2])) for place in found if place[2] is not None]


def computes_itself(place: Place) -> bool:
    """Whether a tensor's class computes by `__torch_dispatch__`. Raises `CaptureError` if such a tensor trains."""
    if not tensor_subclass.dispatches(type(place.tensor)) or spread_tensor(place.tensor) is not None:
        return False
    if place.tensor.requires_grad:
        raise CaptureError(
            f"the parameter {place.fqn} is a {type(place.tensor).__qualname__}, a class of tensors with operators of its own, and "
            "requires grad: gradients of such parameters cannot be captured. Freeze it (requires_grad_(False)), for example as "
            "the base of LoRA, or train a plain nn.Parameter."
        )
    return True


class TensorObjects:
    """The model's own tensors. `places`: where they belong; their stores have fake tensors, or None, outside of `in_use`."""

    def __init__(self, places: Sequence[Place] = ()) -> None:
        self._places = places
        self._mode = _Traced()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        traced = [store[name] for store, name, *_ in self._places]
        self._mode = _Traced()
        for place, tensor in zip(self._places, traced, strict=True):
            if tensor is not None:
                self._mode.add(place.own, tensor)
            place.store[place.name] = place.own
        try:
            with self._mode, replaced(torch.Tensor, "as_subclass", lambda tensor, kind: self._mode.as_subclass(tensor, kind)):
                yield
        finally:
            for place, tensor in zip(self._places, traced, strict=True):
                place.store[place.name] = tensor

    def again(self) -> contextlib.AbstractContextManager[Any]:
        """A context inside `in_use` for the user's code that torch runs within a call of its own."""
        return self._mode

    def traced(self, value: Any) -> Any:
        """The traced tensor of an object of the model; every other value itself."""
        return self._mode.traced(value)


class _Traced(TorchFunctionMode):
    """Replaces objects by their traced tensors in the arguments of calls, and traced tensors by objects in results."""

    def __init__(self) -> None:
        super().__init__()
        self._traced: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # id of an object -> object, traced tensor
        self._own: dict[int, torch.Tensor] = {}  # id of a traced tensor -> object

    def add(self, own: torch.Tensor, traced: torch.Tensor) -> None:
        self._traced[id(own)] = own, traced
        self._own[id(traced)] = own

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        overriding = next(filter(tensor_subclass.overrides, types), None)
        if overriding is not None and tensor_subclass.subclasses_decide():
            with self:
                return overriding.__torch_function__(function, types, args, dict(kwargs or {}))
        found = function(*self.traced(args), **self.traced(dict(kwargs or {})))
        return self._with_objects(found)

    def traced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._traced.get(id(value), (value, value))[1]
        if type(value) in (list, tuple):
            return type(value)(map(self.traced, value))
        if type(value) is dict:
            return {key: self.traced(each) for key, each in value.items()}
        return value

    def _with_objects(self, found: Any) -> Any:
        if isinstance(found, torch.Tensor):
            return self._own.get(id(found), found)
        return type(found)(map(self._with_objects, found)) if type(found) in (list, tuple) else found

    def as_subclass(self, tensor: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
        """An object of class `kind` whose traced tensor is that of `tensor`: torch cannot make one of a fake tensor."""
        traced = self.traced(tensor)
        if not tensor_subclass.overrides(kind):
            return traced
        own = tensor_subclass.made(kind, _BLANK, False)
        self._traced[id(own)] = own, traced
        return own
