"""Numbers and flags that each call of a forward leaves in attributes.

Contract: `NumberUpdate.apply` sets an attribute to eager's value. A tensor assigned in place of a number exists on one stage
only; on the module a `LostTensor` replaces it and raises at every use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from graphpp._torch import pytree
from graphpp._torch.tensor_subclass import made
from graphpp.capture.source_lines import user_line
from graphpp.errors import GraphPPError


class Place(NamedTuple):
    """An attribute of a module, or the item `item` of the list or dict in it."""

    module: str
    attribute: str
    item: Any = None

    def __str__(self) -> str:
        path = f"{self.module}.{self.attribute}" if self.module else self.attribute
        return path if self.item is None else f"{path}.{self.item}"


@dataclass(frozen=True)
class NumberUpdate:
    """The value of an attribute after each call of a captured graph; `is_tensor`: a tensor of unknown value."""

    place: Place
    value: Any  # a number, a flag, or what `as_kept` makes
    is_tensor: bool = False

    def apply(self, model: nn.Module) -> bool:
        """Set the attribute as an eager call does; returns whether its value changed."""
        fqn, attribute, item = self.place
        module = model.get_submodule(fqn)
        own: dict[str, Any] = module._buffers if attribute in module._buffers else vars(module)
        holder: Any = own if item is None else own[attribute]
        key = attribute if item is None else item
        if isinstance(holder, list) and item == len(holder):  # a call adds the item
            holder.append(None)
        if item is None:
            present = getattr(module, attribute, None)  # the class may have the attribute
        else:
            present = holder.get(item) if isinstance(holder, dict) else holder[item]
        value = _lost_tensor(str(self.place)) if self.is_tensor else self.value
        if type(present) is type(value) and repr(present) == repr(value):
            return False
        holder[key] = value
        return True

    def written(self) -> list[Any]:
        return [*self.place, self.value, self.is_tensor]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in nested containers, without lost ones."""
    return [x for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor) and not isinstance(x, LostTensor)]


def as_kept(place: Place, value: Any) -> NumberUpdate:
    """The value that a call keeps, with lost tensors in place of its tensors."""
    lost = _lost_tensor(str(place))
    return NumberUpdate(place, pytree.tree_map(lambda x: lost if isinstance(x, torch.Tensor) else x, value))


def read_update(written: list[Any]) -> NumberUpdate:
    *place, value, is_tensor = written
    return NumberUpdate(Place(*place), value, is_tensor)


class LostTensor(torch.Tensor):
    """Replaces a tensor that no rank keeps. Every use but `repr`, copies and pickles raises `GraphPPError`."""

    _name: str

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's stub has a nameless argument
        return f"<a tensor that the forward assigned to {self._name} and no rank has kept>"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        name = next((each._name for each in args if isinstance(each, cls)), "an attribute")
        raise GraphPPError(
            f"the forward assigns a tensor to {name}, which is read at {user_line()}, and a pipeline "
            "keeps no tensors of a step but losses and metrics. Let the loss function return the tensor, "
            "`return loss, {'name': value}`, and read `metrics` of the step's result."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> LostTensor:
        return self

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _lost_tensor, (self._name,)

    __hash__ = object.__hash__


_BLANK = torch.empty(0, device="meta")


def _lost_tensor(name: str) -> LostTensor:
    found = made(LostTensor, _BLANK, False)
    found._name = name
    return found
