"""Detect changes that make a captured graph stale: everything that a trace reads except the values of tensors.

Contract
--------
- `Watch.look` returns the structure of the model and the conditions of a capture. The structure changes if a module is replaced
  or a parameter tied or untied, which a pipeline does not support. Changed conditions need another capture: flags, numbers and
  tensors in attributes and containers, objects that the code of forward or loss names (`capture/objects/names.py`), functions,
  hooks, members of classes, global variables, layouts of parameters.
- Looking at an unchanged model compares identities only. Conditions keep their objects alive, so that no `id` is reused.
- Changes made by a capture itself, such as a counter in a global variable, are ignored from then on (`Watch.settle`): the path
  keeps its earlier value.
- `Watch.items` gives these objects, within `Limits`, also to the digest that compares ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp.capture.objects.names import Reads, reads_of
from graphpp.capture.objects.walk import HOOKS, PLAIN, Item, Limits, Path, Walk
from graphpp.capture.watch.snapshot import Snapshot, layout

_NEVER_CODE = PLAIN | {list, tuple, dict, torch.Tensor}
_ABSENT: Any = object()


class Same:
    """Compares an object by identity, and keeps it alive so that its address is not reused."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)


@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of a capture as pairs (path, value), with a cached hash."""

    pairs: frozenset[tuple[Path, Any]]
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.pairs))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Conditions) and self._hash == other._hash and self.pairs == other.pairs)

    def changed(self, before: Conditions) -> list[Path]:
        """The paths whose values differ."""
        return sorted({path for path, _ in self.pairs ^ before.pairs}, key=str)


@dataclass(frozen=True)
class Look:
    structure: tuple[Any, ...]
    conditions: Conditions


class Watch:
    """The modules of a model and its loss, and the result of the latest look."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        own = list(model.modules())
        ids = set(map(id, own))
        of_loss = [each for each in loss.modules() if id(each) not in ids] if isinstance(loss, nn.Module) else []
        self.modules = [*own, *of_loss]
        self._own, self._loss, self._fqns = len(own), loss, [fqn for fqn, _ in model.named_modules()]
        self._tree = {id(module): (at,) for at, module in enumerate(self.modules)}
        self._named = WeakTensorKeyDictionary()
        self._frozen: dict[Path, Any] = {}
        self._kinds: set[type] = set()  # classes of the objects walked
        self._functions: dict[str, dict[CodeType, FunctionType]] = {"model": {}, "loss": {}}  # functions walked
        self._reads: dict[str, tuple[frozenset[Same], Reads]] = {}
        self._seen: tuple[Snapshot, Look] | None = None

    def look(self) -> Look:
        """The current state; returns the same object while nothing changes."""
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
        """Ignore everything that has changed since the latest look, permanently."""
        if self._seen is None or self._seen[0].is_unchanged():
            return
        before, after = dict(self._seen[1].conditions.pairs), dict(self.look().conditions.pairs)
        changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
        if changed:
            self._frozen |= {path: before.get(path, _ABSENT) for path in changed}
            self._seen = None

    def name_of(self, path: Path) -> str:
        """A path as text: the module's FQN, then keys and attributes."""
        root, *rest = path
        if isinstance(root, int):
            root = f"model.{self._fqns[root]}" if root < self._own else f"loss.{root - self._own}"
        return ".".join([root.rstrip("."), *(each if isinstance(each, str) else f"[{each!r}]" for each in rest)])

    def items(self, limits: Limits) -> list[Item]:
        """The objects that the code of model and loss reads."""
        known = -1
        while known < self._followed:  # functions and methods found by a walk may read further names
            known = self._followed
            found = {of: list(self._items(of, limits)) for of in self._functions}
            for of, items in found.items():
                self._kinds |= {type(item.value) for item in items if item.kind in ("object", "module")}
                for item in items:
                    if item.kind == "function":
                        self._functions[of].setdefault(item.value.__code__, item.value)
        return [*found["model"], *found["loss"]]

    @property
    def _followed(self) -> int:
        return len(self._kinds) + sum(map(len, self._functions.values()))

    def _items(self, of: str, limits: Limits) -> Iterator[Item]:
        """The objects that the code of the model, or of the loss, reads."""
        reads = self._reads_of(of)
        walk = Walk(reads.names, self._tree | self._tensors(), limits)
        if of == "model":
            for at, module in enumerate(self.modules):
                yield from walk.tree_module((at,), module, ("parameter", "buffer" if at < self._own else "constant"))
        elif not isinstance(self._loss, nn.Module):
            yield from walk.items(("loss",), self._loss)
        for space, name in ((space, name) for space, name in reads.variables if name in space):
            yield from walk.items((of, space.get("__name__"), name), space[name], (space, name))

    def _tensors(self) -> dict[int, Path]:
        """The paths of parameters and buffers, present and former, by `id`.

        In attributes and containers they count by name, for a release replaces them in the model alone.
        """
        stores = ((at, store) for at, each in enumerate(self.modules) for store in (each._parameters, each._buffers))
        for at, store in stores:
            self._named.update({tensor: (at, name) for name, tensor in store.items() if tensor is not None})
        return {id(tensor): path for tensor, path in self._named.items()}

    def _reads_of(self, of: str) -> Reads:
        """The names and variables that code reads; cached until a function or class is added or removed."""
        if of == "loss":
            functions, objects = [self._loss, vars(type(self._loss)).get("__call__")], [self._loss]
            objects.append(getattr(self._loss, "__self__", None))
        else:
            functions = [vars(module).get("forward", type(module).forward) for module in self.modules]
            functions += [hook for module in self.modules for kind in HOOKS for hook in getattr(module, kind).values()]
            held = [value for module in self.modules for value in vars(module).values() if type(value) not in _NEVER_CODE]
            functions += [value for value in held if callable(value)]
            objects = self.modules
        functions += self._functions[of].values()
        classes = {*map(type, objects), *self._kinds}
        source = frozenset(map(Same, (*functions, *classes)))
        known = self._reads.get(of)
        if known is None or known[0] != source:
            known = self._reads[of] = source, reads_of(functions, sorted(classes, key=_full_name))
        return known[1]

    def _structure(self) -> tuple[Any, ...]:
        """The submodules by `id`, and which names share a tensor; replacing a parameter changes neither."""
        children = tuple(id(child) for module in self.modules for child in module._modules.values())
        first: dict[int, int] = {}
        stores = (store for module in self.modules for store in (module._parameters, module._buffers))
        tensors = (tensor for store in stores for tensor in store.values() if tensor is not None)
        ties = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors))
        return children, ties


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def plain_value(value: Any) -> Any:
    """The type and value; a NaN equals itself, and 0.0 differs from -0.0."""
    kind = type(value)
    return (kind, repr(value)) if isinstance(value, float | complex) else (kind, value)


def comparable(item: Item) -> Any:
    """The value that represents an object in conditions; None for an object on which no graph depends."""
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
    "buffer": lambda tensor: layout(tensor)[2:],  # compiled code relies on strides
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
    """Whether autocast is on, and its dtype."""
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))
