"""Record and undo the writes of a traced forward to attributes of its modules: `self.state = new`.

Contract: after `undo_writes` every module has the attributes, buffers, hooks, lists and dicts that it had before, even if the
forward raised. `AttributeWrites` then holds
- the new values of buffers, which the trace returns as additional results (export keeps assignments to buffers of its root
  module and drops all others);
- the tensors outside of buffers that the forward replaced. `refuse_stale` raises if the graph reads one of them as a
  constant, since every later step would read this first value.
- the numbers and the flags (bool, text or None) that the forward changed, with the old and the new value: they leave no trace
  in the graph, and `decide.py` decides whether the graph holds in every call;
- whether the forward gave an attribute a tensor that had none, or added items to a list or dict, hooks for instance: a cache,
  which the next call may read.
`refuse_writes` undoes the writes of custom autograd Functions, and refuses changed numbers and every tensor that they
replace: no graph returns such a tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from graphpp._torch.parallel.sharded_tensor import placed_as
from graphpp.capture.attributes.unknown_integer import UnknownInteger
from graphpp.capture.attributes.updates import Place
from graphpp.errors import CaptureError

_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules"])
_FLAGS = (bool, str, type(None))


class Change(NamedTuple):
    """The number or flag before a forward, and the object after it."""

    old: Any
    new: Any


Changed = Callable[[dict[Any, Any], dict[Any, Any]], Iterator[tuple[Any, Change]]]


@dataclass
class AttributeWrites:
    """The writes of one forward: new values of buffers by FQN, old tensors of other attributes, changed numbers and flags."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[Place, Change] = field(default_factory=dict)
    flags: dict[Place, Change] = field(default_factory=dict)
    caches: bool = False

    def refuse_stale(self, constants: Iterable[torch.Tensor]) -> None:
        """Raise `CaptureError` if a replaced tensor is a constant of the graph."""
        ids = {id(constant) for constant in constants}
        for name, tensor in self.replaced.items():
            if id(tensor) in ids:
                raise CaptureError(
                    f"the forward reads the tensor {name} and replaces it, and it is no buffer: its first value would "
                    "be used in every step. Register it with register_buffer."
                )


@contextlib.contextmanager
def undo_writes(model: nn.Module, writes: AttributeWrites) -> Iterator[None]:
    """Record in `writes` what the forward inside assigns to attributes, then undo it."""
    with _restoring(model) as before:
        yield
        for module in before:
            module.record_writes(writes)


@contextlib.contextmanager
def refuse_writes(model: nn.Module) -> Iterator[None]:
    """Raise `CaptureError` if a custom Function replaces a tensor or changes a number inside; undo its writes."""
    with _restoring(model) as before:
        yield
        for module in before:
            module.refuse_writes()


@contextlib.contextmanager
def _restoring(model: nn.Module) -> Iterator[list[_ModuleState]]:
    before = [_ModuleState(name, module) for name, module in model.named_modules()]
    try:
        yield before
    finally:
        for module in before:
            module.restore()


class _ModuleState:
    """The attributes, buffers and containers of a module before the forward."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name, self.prefix = name, f"{name}." if name else ""
        self.module = module
        self.attributes, self.buffers = dict(vars(module)), dict(module._buffers)
        pairs = [(key, value) for key, value in vars(module).items() if isinstance(value, list | dict)]
        self.containers = [_ContainerState(self.prefix, key, value) for key, value in pairs if key not in _REGISTRIES]

    def record_writes(self, writes: AttributeWrites) -> None:
        writes.numbers.update(self._changed(_changed_numbers))
        writes.flags.update(self._changed(_changed_flags))
        writes.caches |= any(True for _ in _new_tensors(vars(self.module), self.attributes))
        writes.caches |= any(container.now().keys() - container.before.keys() for container in self.containers)
        writes.replaced.update(self._replaced_attributes())
        for key, old in self.buffers.items():
            new, fqn = self.module._buffers.get(key), self.prefix + key
            if old is None and new is not None:
                raise CaptureError(
                    f"the buffer {fqn} is None, and the forward assigns a tensor: every step would find None again. "
                    "Register it with a tensor of its shape."
                )
            if old is not None and new is not old:
                writes.buffers[fqn] = _new_value(fqn, old, new)

    def refuse_writes(self) -> None:
        for place in self._changed(_changed_numbers):
            raise CaptureError(
                f"a custom autograd.Function changes the number {place}: the captured graph would do without it. Change it in "
                "the forward of the module."
            )
        buffers = [key for key, old in self.buffers.items() if self.module._buffers.get(key) is not old]
        for fqn in [*(self.prefix + key for key in buffers), *self._replaced_attributes()]:
            raise CaptureError(
                f"a custom autograd.Function assigns {fqn}: the captured graph would do without it. Return the new value "
                "from the Function, and assign it in the forward of the module."
            )

    def _replaced_attributes(self) -> dict[str, torch.Tensor]:
        found = {self.prefix + key: old for key, old in _replaced_tensors(vars(self.module), self.attributes)}
        for container in self.containers:
            found.update(container.replaced())
        return found

    def _changed(self, changed: Changed) -> dict[Place, Change]:
        now = vars(self.module)
        of_class = {key: getattr(type(self.module), key, None) for key in now}
        before = {**of_class, **self.attributes}
        found = {Place(self.name, key): change for key, change in changed(now, before)}
        for container in self.containers:
            changes = changed(container.now(), container.before)
            found.update({Place(self.name, container.attribute, key): change for key, change in changes})
        return found

    def restore(self) -> None:
        _restore_dict(self.module._buffers, self.buffers)
        _restore_dict(vars(self.module), self.attributes)
        for container in self.containers:
            container.restore()


class _ContainerState:
    """A list or dict among a module's attributes, and its items before the forward."""

    def __init__(self, prefix: str, attribute: str, container: list[Any] | dict[Any, Any]) -> None:
        self.prefix, self.attribute, self.container = f"{prefix}{attribute}.", attribute, container
        self.before = self.now()

    def now(self) -> dict[Any, Any]:
        return dict(self.container) if isinstance(self.container, dict) else dict(enumerate(self.container))

    def replaced(self) -> dict[str, torch.Tensor]:
        """The tensors that were replaced by key; all tensors of a list that has changed, since its indices shift."""
        now = {} if isinstance(self.container, list) and self._changed() else self.now()
        return {f"{self.prefix}{key}": old for key, old in _replaced_tensors(now, self.before)}

    def _changed(self) -> bool:
        now = self.now()
        return list(now) != list(self.before) or any(now[key] is not old for key, old in self.before.items())

    def restore(self) -> None:
        if not self._changed():
            return
        self.container.clear()
        if isinstance(self.container, dict):
            self.container.update(self.before)
        else:
            self.container.extend(self.before.values())


def _changed_numbers(now: dict[Any, Any], before: dict[Any, Any]) -> Iterator[tuple[Any, Change]]:
    """The keys whose int, float or `UnknownInteger` has changed. A bool may change: it is no number here."""
    for key, old in before.items():
        new = now.get(key, old)
        number = type(old) in (int, float) and (type(new) is not type(old) or new != old)
        if number or (type(old) is UnknownInteger and new is not old):
            yield key, Change(old, new)


def _changed_flags(now: dict[Any, Any], before: dict[Any, Any]) -> Iterator[tuple[Any, Change]]:
    """The keys whose bool, text or None has become another one."""
    for key, old in before.items():
        new = now.get(key, old)
        if type(old) in _FLAGS and type(new) in _FLAGS and new != old:
            yield key, Change(old, new)


def _new_tensors(now: dict[Any, Any], before: dict[Any, Any]) -> Iterator[str]:
    """The keys that have a tensor now, or a container, and had none of their own."""
    holders = (torch.Tensor, list, tuple, dict)
    yield from (key for key, new in now.items() if isinstance(new, holders) and before.get(key) is None)


def _replaced_tensors(now: dict[Any, Any], before: dict[Any, Any]) -> list[tuple[Any, torch.Tensor]]:
    """The keys whose tensor is another object now, with the old tensor."""
    pairs = before.items()
    return [(name, old) for name, old in pairs if isinstance(old, torch.Tensor) and now.get(name) is not old]


def _new_value(fqn: str, old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    """The new value of a buffer. Raises `CaptureError` if it is gone or has another shape or dtype."""
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        found = "removes it" if new is None else f"assigns {list(new.shape)} {new.dtype}"
        raise CaptureError(
            f"the buffer {fqn} is {list(old.shape)} {old.dtype}, and the forward {found}: "
            "a buffer keeps its shape and dtype from step to step."
        )
    placed = placed_as(new.detach(), old)
    if placed is None:
        raise CaptureError(f"the buffer {fqn} is a {type(old).__name__}, and the forward assigns a {type(new).__name__}")
    return placed.clone()  # the new value may be another buffer itself


def _restore_dict(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)
