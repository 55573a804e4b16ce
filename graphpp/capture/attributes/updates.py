"""How a forward changes numbers in attributes, and the attributes' values after a step.

Contract: `apply_updates` gives the numbers the values that eager leaves. A tensor that a forward assigns in place of a number
exists on one stage only. `ReplacedNumber` stands for the tensor on the module, and raises at every use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, NoReturn

from torch import nn

from graphpp.errors import GraphPPError


class Place(NamedTuple):
    """An attribute of a module, or the item `item` of the list or dict in an attribute."""

    module: str
    attribute: str
    item: int | str | None = None

    def __str__(self) -> str:
        path = f"{self.module}.{self.attribute}" if self.module else self.attribute
        return path if self.item is None else f"{path}.{self.item}"

    def read(self, model: nn.Module) -> Any:
        """The value at this place."""
        value = getattr(model.get_submodule(self.module), self.attribute)
        return value if self.item is None else value[self.item]

    def write(self, model: nn.Module, value: Any) -> None:
        """Put a value at this place."""
        module = model.get_submodule(self.module)
        if self.item is None:
            vars(module)[self.attribute] = value
        else:
            vars(module)[self.attribute][self.item] = value


class Effect(Enum):
    """How each call changes a number."""

    LAST = "last"  # the number becomes `value`; the graph holds for the old and for the new number
    OVERWRITTEN = "overwritten"  # the number becomes `value`; the graph holds for every old number
    COUNTER = "counter"  # `value` is added; the graph holds for every number
    TENSOR = "tensor"  # a tensor replaces the number; the graph holds for every old number


@dataclass(frozen=True)
class NumberUpdate:
    """The change of a number by each call of one captured graph."""

    place: Place
    effect: Effect
    value: int | float | None

    def apply(self, model: nn.Module) -> None:
        """Change the number as one call in eager does."""
        if self.effect is Effect.TENSOR:
            self.place.write(model, ReplacedNumber(str(self.place)))
        elif self.effect is Effect.COUNTER:
            self.place.write(model, self.place.read(model) + self.value)
        else:
            self.place.write(model, self.value)

    def written(self) -> list[Any]:
        """The update as plain data."""
        return [*self.place, self.effect.value, self.value]


def read_update(written: list[Any]) -> NumberUpdate:
    """The update that `NumberUpdate.written` gave."""
    *place, effect, value = written
    return NumberUpdate(Place(*place), Effect(effect), value)


def apply_updates(model: nn.Module, calls: Iterable[Iterable[NumberUpdate]]) -> None:
    """Change the numbers as the calls of one step do, in the order of the microbatches."""
    for updates in calls:
        for update in updates:
            update.apply(model)


class _MissingAttributeError(GraphPPError, AttributeError):
    """An attribute of a tensor that no rank keeps: `hasattr` is False, as for a number."""


class ReplacedNumber:
    """Stands on a module for a tensor that no rank keeps. Every use raises `GraphPPError`."""

    def __init__(self, name: str) -> None:
        self.__dict__["name"] = name

    def __repr__(self) -> str:
        return f"<a tensor that the forward assigned to {self.name} and no rank has kept>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _MissingAttributeError(self._message())

    def _message(self) -> str:
        return (
            f"the forward assigns a tensor to {self.name}, and a pipeline keeps no tensors of a step but losses and metrics. "
            "Let the loss function return it, `return loss, {'name': value}`, and read `metrics` of the step's result."
        )

    def _refuse(self, *_: Any) -> NoReturn:
        raise GraphPPError(self._message())

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        next((each for each in args if isinstance(each, cls)), cls("an attribute"))._refuse()

    __bool__ = __float__ = __int__ = __index__ = __len__ = __iter__ = __getitem__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _refuse
    __hash__ = object.__hash__
