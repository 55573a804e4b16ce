"""The numbers with which a trace begins, and the attributes that a forward reads before it writes them.

Contract: while `EntryState.installed` is open, the model has the numbers of the state. Accesses to `watched` attributes are
recorded: reads before the first write, with the user's line, and writes. A data descriptor in the module's class sees them.
Afterwards modules and classes are as before. Other instances of the class see no difference.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from graphpp.capture.attributes.updates import Place, ReplacedNumber
from graphpp.capture.source_lines import user_frame

_ABSENT: Any = object()


@dataclass
class Accesses:
    """Watched attributes that a forward reads before it writes them, with the user's line, and those that it writes."""

    reads: dict[Place, str] = field(default_factory=dict)
    writes: set[Place] = field(default_factory=set)


@dataclass(frozen=True)
class EntryState:
    """Numbers by place, and watched attributes."""

    values: Mapping[Place, Any] = field(default_factory=dict)
    watched: frozenset[Place] = frozenset()

    @contextlib.contextmanager
    def installed(self, model: nn.Module, accesses: Accesses) -> Iterator[None]:
        """Give the model the numbers, and record the accesses to watched attributes."""
        with contextlib.ExitStack() as stack:
            for place, value in self.values.items():
                stack.callback(_restore, model, place, _present(model, place))
                place.write(model, value)
            for place in sorted(self.watched, key=str):
                stack.enter_context(_watched(model.get_submodule(place.module), place, accesses))
            yield


def replaced_numbers(model: nn.Module) -> EntryState:
    """The state that watches each `ReplacedNumber` of an earlier step: no trace may read it."""
    pairs = ((Place(fqn, key), value) for fqn, module in model.named_modules() for key, value in vars(module).items())
    return EntryState(watched=frozenset(place for place, value in pairs if type(value) is ReplacedNumber))


def _present(model: nn.Module, place: Place) -> Any:
    """The module's own value at a place; `_ABSENT` where the module has its class's value."""
    return vars(model.get_submodule(place.module)).get(place.attribute, _ABSENT) if place.item is None else place.read(model)


def _restore(model: nn.Module, place: Place, value: Any) -> None:
    if value is _ABSENT:
        vars(model.get_submodule(place.module)).pop(place.attribute, None)
    else:
        place.write(model, value)


@contextlib.contextmanager
def _watched(module: nn.Module, place: Place, accesses: Accesses) -> Iterator[None]:
    """Watch one attribute of one module; an attribute that the class computes counts as read."""
    owner, name = type(module), place.attribute
    own, inherited = vars(owner).get(name, _ABSENT), getattr(owner, name, _ABSENT)
    if isinstance(own, _WatchedAttribute):
        own.places[id(module)] = place
        yield
        return
    if any(_computes(vars(base).get(name)) for base in owner.__mro__):
        accesses.reads[place] = ""
        yield
        return
    setattr(owner, name, _WatchedAttribute(name, inherited, {id(module): place}, accesses))
    try:
        yield
    finally:
        if own is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _computes(attribute: Any) -> bool:
    """Whether an attribute of a class is a property or another descriptor."""
    return hasattr(type(attribute), "__get__") and not isinstance(attribute, _WatchedAttribute)


@dataclass
class _WatchedAttribute:
    """A data descriptor: an attribute as without it, but accesses by the modules in `places` are recorded."""

    name: str
    inherited: Any
    places: dict[int, Place]
    accesses: Accesses

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        place = self.places.get(id(module))
        if place is not None and place not in self.accesses.writes and place not in self.accesses.reads:
            self.accesses.reads[place] = user_frame(traceback.extract_stack())
        value = self.inherited if module is None else vars(module).get(self.name, self.inherited)
        if value is _ABSENT:
            raise AttributeError(self.name)
        return value

    def __set__(self, module: nn.Module, value: Any) -> None:
        self._note_write(module)
        vars(module)[self.name] = value

    def __delete__(self, module: nn.Module) -> None:
        self._note_write(module)
        if vars(module).pop(self.name, _ABSENT) is _ABSENT:
            raise AttributeError(self.name)

    def _note_write(self, module: nn.Module) -> None:
        place = self.places.get(id(module))
        if place is not None:
            self.accesses.writes.add(place)
