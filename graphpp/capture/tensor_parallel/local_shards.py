"""Let a forward read parameters as `DTensor`s while the model has local shards in their places.

Contract: while `SpreadTensors.read_as_dtensors` is open, each shard is replaced by a `DTensor` made from it, with mesh,
placements, shape and strides of the original. Tied tensors stay tied. Gradients flow to the local shard; they are complete
where the original is replicated.
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
    """A store of a module, the tensor's name in it, its mesh and placements, and whether it is a parameter."""

    store: dict[str, Any]
    name: str
    spread: Spread
    is_parameter: bool


@dataclass(frozen=True)
class SpreadTensors:
    """The places of a model's `DTensor` parameters and buffers."""

    places: tuple[SpreadPlace, ...]

    @classmethod
    def of(cls, model: nn.Module) -> SpreadTensors:
        stores = [store for module in model.modules() for store in (module._parameters, module._buffers)]
        named = ((store, name, tensor) for store in stores for name, tensor in store.items() if tensor is not None)
        parts = ((store, name, spread_tensor(tensor), isinstance(tensor, nn.Parameter)) for store, name, tensor in named)
        return cls(tuple(SpreadPlace(store, name, part.spread, is_) for store, name, part, is_ in parts if part is not None))

    @contextlib.contextmanager
    def read_as_dtensors(self) -> Iterator[None]:
        """While open, the places have `DTensor`s of their current tensors."""
        locals_ = [(place.store, place.name, place.store[place.name]) for place in self.places]
        made: dict[int, Any] = {}
        for place, (store, name, local) in zip(self.places, locals_, strict=True):
            if id(local) not in made:
                made[id(local)] = as_dtensor(local, place.spread)
                made[id(local)]._is_param = place.is_parameter  # read by `isinstance(.., nn.Parameter)`
            store[name] = made[id(local)]
        try:
            yield
        finally:
            for store, name, local in locals_:
                store[name] = local
