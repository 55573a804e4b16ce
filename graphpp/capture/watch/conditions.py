"""Detect changes of a model that make its captured graph stale: everything that a trace reads besides the tensors' values.

Contract
--------
- `Watch.look` gives the structure of the model and the conditions of a capture. The structure changes if a module is
  exchanged or a parameter tied or untied, which a pipeline cannot follow. The conditions change if another capture is
  needed: flags, numbers and tensors in attributes and their containers, objects of the program that code of the forward or
  the loss asks for (`capture/objects/names.py`), functions, hooks, members of classes, global variables, layouts of parameters.
- A look at an unchanged model compares identities only. Conditions hold their objects, so no identity is used a second time.
- What a capture itself changes, as a counter in a global variable, is no condition from then on (`Watch.settle`):
  the path keeps the value that it had before.
- `Watch.items` gives the same objects, as far as `Limits` say, to the digest by which ranks are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from graphpp.capture.objects.names import Reads, reads_of
from graphpp.capture.objects.walk import HOOKS, PLAIN, Item, Limits, Path, Walk
from graphpp.capture.watch.snapshot import Snapshot, layout

_NEVER_CODE = PLAIN | {list, tuple, dict, torch.Tensor}
_ABSENT: Any = object()


class Same:
    """An object that is compared by identity, and held, so that no other object gets the same address."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of a capture, pairs of a path and a value, with their hash, which is computed once."""

    pairs: frozenset[tuple[Path, Any]]
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.pairs))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Conditions) and self._hash == other._hash and self.pairs == other.pairs)


@dataclass(frozen=True)
class Look:
    """The state of a model: its structure, and under which conditions it is captured."""

    structure: tuple[Any, ...]
    conditions: Conditions


class Watch:
    """The modules of a model and its loss, and what was seen of them at the latest look."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        own = list(model.modules())
        ids = set(map(id, own))
        of_loss = [each for each in loss.modules() if id(each) not in ids] if isinstance(loss, nn.Module) else []
        self.modules = [*own, *of_loss]
        self._own, self._loss = len(own), loss
        self._tree = {id(module): (at,) for at, module in enumerate(self.modules)}
        self._frozen: dict[Path, Any] = {}
        self._kinds: set[type] = set()  # the classes of the objects that were followed
        self._functions: dict[CodeType, FunctionType] = {}  # the functions that were followed
        self._reads: dict[str, tuple[frozenset[Same], Reads]] = {}
        self._seen: tuple[Snapshot, Look] | None = None

    def look(self) -> Look:
        """The present state; the same object while nothing has changed."""
        if self._seen is None or not self._seen[0].is_unchanged():
            snapshot, pairs = Snapshot(), {}
            for item in self.items(Limits()):
                snapshot.note(item)
                value = comparable(item)
                if value is not None:
                    pairs[item.path] = value
            pairs |= self._frozen
            conditions = Conditions(frozenset(pair for pair in pairs.items() if pair[1] is not _ABSENT))
            self._seen = snapshot, Look(self._structure(), conditions)
        return self._seen[1]

    def settle(self) -> None:
        """Take everything that has changed since the latest look for unchanged, for ever."""
        if self._seen is None or self._seen[0].is_unchanged():
            return
        before, after = dict(self._seen[1].conditions.pairs), dict(self.look().conditions.pairs)
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        if changed:
            self._frozen |= {path: before.get(path, _ABSENT) for path in changed}
            self._seen = None

    def items(self, limits: Limits) -> list[Item]:
        """The objects that the code of model and loss reads, by path."""
        while True:  # functions and methods of objects that a walk finds may ask for further names
            known = len(self._kinds) + len(self._functions)
            found = [*self._items("model", limits), *self._items("loss", limits)]
            self._kinds |= {type(item.value) for item in found if item.kind in ("object", "module")}
            for item in found:
                if item.kind == "function":
                    self._functions.setdefault(item.value.__code__, item.value)
            if len(self._kinds) + len(self._functions) == known:
                return found

    def _items(self, of: str, limits: Limits) -> Iterator[Item]:
        """The objects for which the code of the model, or of the loss, asks."""
        reads = self._reads_of(of)
        walk = Walk(reads.names, self._tree, limits)
        if of == "model":
            for at, module in enumerate(self.modules):
                yield from walk.tree_module((at,), module, ("parameter", "buffer" if at < self._own else "constant"))
        elif not isinstance(self._loss, nn.Module):
            yield from walk.items(("loss",), self._loss)
        for space, name in ((space, name) for space, name in reads.variables if name in space):
            yield from walk.items((of, space.get("__name__"), name), space[name], (space, name))

    def _reads_of(self, of: str) -> Reads:
        """The names for which code asks, and its variables; read again only if another function or class is in reach."""
        if of == "loss":
            functions, objects = [self._loss, vars(type(self._loss)).get("__call__")], [self._loss]
            objects.append(getattr(self._loss, "__self__", None))
        else:
            functions = [vars(module).get("forward", type(module).forward) for module in self.modules]
            functions += [hook for module in self.modules for kind in HOOKS for hook in getattr(module, kind).values()]
            held = [value for module in self.modules for value in vars(module).values() if type(value) not in _NEVER_CODE]
            functions += [value for value in held if callable(value)]
            objects = self.modules
        functions += self._functions.values()
        classes = {*map(type, objects), *self._kinds}
        source = frozenset(map(Same, (*functions, *classes)))
        known = self._reads.get(of)
        if known is None or known[0] != source:
            known = self._reads[of] = source, reads_of(functions, sorted(classes, key=_full_name))
        return known[1]

    def _structure(self) -> tuple[Any, ...]:
        """The submodules of each module by identity, and which names share a tensor; a replaced parameter changes neither."""
        children = tuple(id(child) for module in self.modules for child in module._modules.values())
        first: dict[int, int] = {}
        tensors = (t for module in self.modules for store in (module._parameters, module._buffers) for t in store.values())
        ties = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors) if tensor is not None)
        return children, ties


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_value(value: Any) -> Any:
    """The type and value of a flag, number or name: a NaN equals itself, and 0.0 is not -0.0."""
    kind = type(value)
    return (kind, repr(value)) if isinstance(value, float | complex) else (kind, value)


def comparable(item: Item) -> Any:
    """The value by which an object is compared with that of an earlier step; None for an object on which no graph depends."""
    if item.first is not None:
        return item.first
    return _COMPARABLE.get(item.kind, Same)(item.value)


def _key(value: Any) -> Any:
    return plain_value(value) if type(value) in PLAIN else Same(value)


_COMPARABLE: Mapping[str, Any] = {
    "plain": plain_value,
    "text": str,
    "ignored": lambda value: None,
    "parameter": layout,
    "buffer": lambda tensor: layout(tensor)[2:],  # compiled code relies on the strides
    "constant": lambda tensor: (Same(tensor), layout(tensor)),
    "array": lambda array: (str(array.dtype), array.shape, array.tobytes()),
    "mapping": lambda mapping: tuple(map(_key, mapping)),
    "sequence": lambda values: "sequence",
    "set": lambda values: frozenset(map(_key, values)),
    "function": lambda function: Same(function.__code__),
    "wrapper": type,
    "variable": lambda variable: "variable",
    "object": lambda value: Same(type(value)),
    "module": lambda module: Same(type(module)),
}


def autocast_state(device_type: str) -> tuple[bool, str]:
    """True and the dtype if autocast is on around the call."""
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))
