"""Let a forward read parameters as `DTensor`s while the model has this rank's local shards in their places.

Contract: while `SpreadTensors.read_as_dtensors` is open, the model has a `DTensor` in the place of each tensor that was one.
It is made of the tensor that was there just before, with the mesh, placements, shape and strides of the original. Tied tensors
stay tied. Gradients pass to the local shard, and are whole where the original is replicated. Afterwards the places are as
before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from graphpp._torch.parallel.sharded_tensor import Spread, as_dtensor
from graphpp.runtime.dtensors import spread_tensor


class SpreadPlace(NamedTuple):
    """The store of a module, the name in the store, how the tensor there is spread, and whether it is a parameter."""

    store: dict[str, Any]
    name: str
    spread: Spread
    is_parameter: bool


@dataclass(frozen=True)
class SpreadTensors:
    """The places of the parameters and buffers that a model spreads over ranks."""

    places: tuple[SpreadPlace, ...]

    @classmethod
    def of(cls, model: nn.Module) -> SpreadTensors:
        """Those of a model as it is now."""
        stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
        named = ((store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None)
        parts = ((store, name, spread_tensor(tensor), isinstance(tensor, nn.Parameter)) for store, name, tensor in named)
        return cls(tuple(SpreadPlace(store, name, part.spread, is_) for store, name, part, is_ in parts if part is not None))

    @contextlib.contextmanager
    def read_as_dtensors(self) -> Iterator[None]:
        """While open, the model has `DTensor`s of the tensors that are in these places."""
        locals_ = [(place.store, place.name, place.store[place.name]) for place in self.places]
        made: dict[int, Any] = {}
        for place, (store, name, local) in zip(self.places, locals_, strict=True):
            if id(local) not in made:
                made[id(local)] = as_dtensor(local, place.spread)
                made[id(local)]._is_param = place.is_parameter  # which `isinstance(.., nn.Parameter)` asks for
            store[name] = made[id(local)]
        try:
            yield
        finally:
            for store, name, local in locals_:
                store[name] = local
