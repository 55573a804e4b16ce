"""Detect changes of a model that make its captured graph stale: everything that a trace reads besides the tensors' values.

Contract
--------
- `Watch.look` gives the structure of the model and the conditions of a capture. The structure changes if a module is
  exchanged or a parameter tied or untied, which a pipeline cannot follow. The conditions change if another capture is
  needed: flags, numbers and tensors in attributes and their containers, objects of the program that code of the forward or
  the loss asks for (`reads.py`), functions, hooks, global variables, layouts of parameters, autocast.
- A look at an unchanged model compares identities only. Conditions hold their objects, so no identity is used a second time.
- What a capture itself changes, as a counter in a global variable, is no condition from then on (`Watch.settle`):
  the place keeps the value that it had before.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphpp.capture.watch.reads import Reads, reads_of
from graphpp.capture.watch.snapshot import Place, Same, State
from graphpp.capture.watch.values import Walk

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REGISTRIES = ("_parameters", "_buffers", "_modules", *_HOOKS)
_ALL_REGISTRIES = frozenset(vars(nn.Module())) - {"training"}
_NEVER_CODE = frozenset((bool, int, float, str, type(None), list, tuple, dict, OrderedDict, torch.Tensor))


@dataclass(frozen=True, eq=False)
class Conditions:
    """The conditions of a capture, with their hash, which is computed once."""

    modules: tuple[Any, ...]
    others: tuple[Any, ...]
    _hash: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.modules, self.others)))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same_kind = isinstance(other, Conditions) and self._hash == other._hash
        return same_kind and (self.modules, self.others) == (other.modules, other.others)  # type: ignore[attr-defined]


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
        self._of_loss = [each for each in loss.modules() if id(each) not in ids] if isinstance(loss, nn.Module) else []
        self.modules = [*own, *self._of_loss]
        self._loss = loss
        self._frozen: dict[Place, Any] = {}
        self._kinds: set[type] = set()  # the classes of the objects that were followed
        self._reads: dict[str, tuple[frozenset[Same], Reads]] = {}
        self._seen: tuple[State, Look] | None = None

    def look(self) -> Look:
        """The present state; the same object while nothing has changed."""
        if self._seen is None or not self._seen[0].is_unchanged():
            known = -1
            while known < len(self._kinds):  # methods of objects that a walk finds may ask for further names
                known, state = len(self._kinds), State()
                conditions = self._conditions(state)
            self._seen = state, Look(self._structure(), conditions)
        return self._seen[1]

    def settle(self) -> None:
        """Take the variables and attributes of objects that have changed since the latest look for unchanged, for ever."""
        if self._seen is None or self._seen[0].is_unchanged():
            return
        before, _ = self._seen
        self.look()
        after = self._seen[0].seen
        changed = [place for place in (*before.seen, *after) if before.seen.get(place) != after.get(place)]
        if changed:
            self._frozen |= {place: before.seen.get(place) for place in changed}
            self._seen = None

    def _structure(self) -> tuple[Any, ...]:
        """The submodules of each module by identity, and which names share a tensor; a replaced parameter changes neither."""
        children = tuple(id(child) for module in self.modules for child in module._modules.values())
        first: dict[int, int] = {}
        tensors = (t for module in self.modules for store in (module._parameters, module._buffers) for t in store.values())
        ties = tuple(first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors) if tensor is not None)
        return children, ties

    def _conditions(self, state: State) -> Conditions:
        parameters = [p for module in self.modules for p in module._parameters.values() if p is not None]
        buffers = [b for module in self.modules for b in module._buffers.values() if b is not None]
        of_model, of_loss = self._walk(state, "model"), self._walk(state, "loss")
        modules = tuple(self._of_module(module, state, of_model) for module in self.modules)
        for module in self.modules:
            for name in _REGISTRIES:
                state.mapping(getattr(module, name))
        others = (
            tuple(Same(buffer) for module in self._of_loss for buffer in module._buffers.values()),
            of_model.of_classes(dict.fromkeys(type(module) for module in self.modules)),
            of_model.of_variables(),
            of_loss.of_variables(),
            of_loss.value(self._loss) if not isinstance(self._loss, nn.Module | type) else (),
            tuple(map(state.of_parameter, parameters)),
            tuple(map(state.of_buffer, buffers)),
        )
        self._kinds |= of_model.kinds | of_loss.kinds
        return Conditions(modules, others)

    def _walk(self, state: State, of: str) -> Walk:
        """A walk that follows the objects for which the code of the model, or of the loss, asks."""
        if of == "loss":
            functions, objects = [self._loss, vars(type(self._loss)).get("__call__")], [self._loss]
            objects.append(getattr(self._loss, "__self__", None))
        else:
            functions = [vars(module).get("forward", type(module).forward) for module in self.modules]
            functions += [hook for module in self.modules for kind in _HOOKS for hook in getattr(module, kind).values()]
            held = [value for module in self.modules for value in vars(module).values() if type(value) not in _NEVER_CODE]
            functions += [value for value in held if callable(value)]
            objects = self.modules
        classes = {*map(type, objects), *self._kinds}
        source = frozenset(map(Same, (*functions, *classes)))
        known = self._reads.get(of)
        if known is None or known[0] != source:
            known = self._reads[of] = source, reads_of(functions, classes)
        return Walk(state, known[1], self._frozen)

    def _of_module(self, module: nn.Module, state: State, walk: Walk) -> tuple[Any, ...]:
        """A module's attributes, and its hooks."""
        attributes, of_torch = vars(module), any(map(_is_of_torch, type(module).__mro__))
        state.mapping(attributes)
        hooks = [hook for kind in _HOOKS if getattr(module, kind) for hook in getattr(module, kind).values()]
        found = []
        for name, value in attributes.items():
            if name not in _ALL_REGISTRIES:
                seen = walk.attribute(name, value, of_torch=of_torch)
                if seen is not None:
                    found.append((name, seen))
        return tuple(found), tuple(map(Same, hooks))


def _is_of_torch(base: type) -> bool:
    return base.__module__.startswith("torch.") and base is not nn.Module


def autocast_state(device_type: str) -> tuple[bool, str]:
    """True and the dtype if autocast is on around the call."""
    return torch.is_autocast_enabled(device_type), str(torch.get_autocast_dtype(device_type))
