"""Record and undo the writes of a traced forward to attributes of its modules (`self.state = new`).

Contract: after `undo_writes` all attributes, buffers, hooks, lists and dicts of every module are restored, even if the forward
raised. `AttributeWrites` then has
- the new values of buffers, which the trace returns as additional results (export drops most assignments to buffers);
- the replaced tensors that are no buffers; `refuse_stale` refuses them as constants of the graph;
- the changed numbers and flags (bool, text or None), about which `second_call.py` decides;
- what the forward keeps and the next call may read: tensors and containers in attributes and buffers that were None, and new
  items of a list or dict, such as hooks (`second_call.py` decides, too).
`refuse_writes` undoes the writes of custom autograd Functions, and refuses changed numbers and replaced tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphpp._torch.parallel.sharded_tensor import placed_as
from graphpp.capture.attributes.numbers import NumberUpdate, Place
from graphpp.errors import CaptureError

_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules"])
_NUMBERS, _FLAGS = (int, float), (bool, str, type(None))


@dataclass
class AttributeWrites:
    """The writes of one forward: new values of buffers, old tensors of other attributes, numbers and flags, kept tensors."""

    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    replaced: dict[str, torch.Tensor] = field(default_factory=dict)
    numbers: dict[Place, NumberUpdate] = field(default_factory=dict)
    flags: dict[Place, NumberUpdate] = field(default_factory=dict)
    kept: dict[Place, Any] = field(default_factory=dict)

    @property
    def updates(self) -> dict[Place, NumberUpdate]:
        """The numbers; if nothing is kept also the flags."""
        return self.numbers if self.kept else self.numbers | self.flags

    def refuse_stale(self, constants: Iterable[torch.Tensor]) -> None:
        ids = {id(constant) for constant in constants}
        for name, tensor in self.replaced.items():
            if id(tensor) in ids:
                raise CaptureError(
                    f"the forward reads the tensor {name} and replaces it, and it is no buffer: its first value would "
                    "be used in every step. Register it with register_buffer."
                )


@contextlib.contextmanager
def undo_writes(model: nn.Module, writes: AttributeWrites, updates: Iterable[NumberUpdate]) -> Iterator[None]:
    """Start the forward with `updates`, record its assignments in `writes`, then undo them."""
    with _restored(model, updates) as (buffers, stores):
        yield
        for fqn, old, new in _assigned(buffers):
            if old is not None:
                writes.buffers[fqn] = _new_value(fqn, old, new)
            elif new is not None:
                writes.kept[Place(*fqn.rpartition(".")[::2])] = new
        for store in stores:
            writes.replaced.update(store.replaced())
            writes.numbers.update(store.numbers())
            writes.flags.update(store.flags())
            writes.kept.update(store.kept())


@contextlib.contextmanager
def refuse_writes(model: nn.Module, updates: Collection[NumberUpdate]) -> Iterator[None]:
    """Start with `updates`. Raise `CaptureError` if a custom Function changes a number or replaces a tensor."""
    with _restored(model, updates), _restored(model) as (buffers, stores):
        yield
        for place in (place for store in stores for place in store.numbers()):
            raise CaptureError(
                f"a custom autograd.Function changes the number {place}: the captured graph would do without it. Change it in "
                "the forward of the module."
            )
        tensors = [fqn for fqn, _, _ in _assigned(buffers)] + [name for store in stores for name in store.replaced()]
        for name in tensors:
            raise CaptureError(
                f"a custom autograd.Function assigns {name}: the captured graph would do without it. Return the new value "
                "from the Function, and assign it in the forward of the module."
            )


Buffers = list[tuple[str, dict[str, Any], dict[str, Any]]]  # (FQN prefix, current buffers of a module, earlier buffers)


@contextlib.contextmanager
def _restored(model: nn.Module, updates: Iterable[NumberUpdate] = ()) -> Iterator[tuple[Buffers, list[_Store]]]:
    """Apply `updates`, and restore all modules on closing; yields objects that know the earlier state."""
    buffers: Buffers = []
    stores: list[_Store] = []
    for fqn, module in model.named_modules():
        attributes = vars(module)
        buffers.append((f"{fqn}." if fqn else "", module._buffers, dict(module._buffers)))
        stores.append(_Store(fqn, None, attributes, type(module)))
        containers = [(key, value) for key, value in attributes.items() if isinstance(value, list | dict)]
        stores += [_Store(fqn, key, value) for key, value in containers if key not in _REGISTRIES]
    try:
        for update in updates:
            update.apply(model)
        yield buffers, stores
    finally:
        for _, now, before in buffers:
            _restore_dict(now, before)
        for store in stores:
            store.restore()


def _assigned(buffers: Buffers) -> Iterator[tuple[str, torch.Tensor | None, torch.Tensor | None]]:
    """FQN, old and new tensor of each reassigned buffer."""
    for prefix, now, before in buffers:
        for key, old in before.items():
            new = now.get(key)
            if new is not old:
                yield prefix + key, old, new


class _Store:
    """The attributes of a module, or a container in the attribute `attribute`, now and before a forward."""

    def __init__(self, module: str, attribute: str | None, held: Any, kind: type | None = None) -> None:
        """`kind`: the class whose attributes are defaults for the module's own."""
        self._module, self._attribute, self._held, self._kind = module, attribute, held, kind
        self._before = self._now()

    def _now(self) -> dict[Any, Any]:
        return dict(self._held) if isinstance(self._held, dict) else dict(enumerate(self._held))

    def _place(self, key: Any) -> Place:
        return Place(self._module, key) if self._attribute is None else Place(self._module, self._attribute, key)

    def replaced(self) -> dict[str, torch.Tensor]:
        """The replaced tensors by name; all tensors of a changed list, since its indices shift."""
        now = {} if isinstance(self._held, list) and self._has_changed() else self._now()
        tensors = [(key, old) for key, old in self._before.items() if isinstance(old, torch.Tensor)]
        return {str(self._place(key)): old for key, old in tensors if now.get(key) is not old}

    def numbers(self) -> dict[Place, NumberUpdate]:
        """The ints and floats that changed or became a tensor."""
        return {place: new for place, old, new in self._changed() if type(old) in _NUMBERS}

    def flags(self) -> dict[Place, NumberUpdate]:
        """The bools, texts and Nones that changed to another of these or to a number."""
        changed = ((place, old, new) for place, old, new in self._changed() if not new.is_tensor)
        return {place: new for place, old, new in changed if type(old) in _FLAGS and type(new.value) in (*_FLAGS, *_NUMBERS)}

    def _changed(self) -> Iterator[tuple[Place, Any, NumberUpdate]]:
        now = self._now()
        of_class = {} if self._kind is None else {key: getattr(self._kind, key, None) for key in now}
        for key, old in {**of_class, **self._before}.items():
            new, is_tensor = now.get(key, old), isinstance(now.get(key), torch.Tensor)
            if type(old) in (*_NUMBERS, *_FLAGS) and new is not old and (type(new) is not type(old) or new != old):
                place = self._place(key)
                yield place, old, NumberUpdate(place, None if is_tensor else new, is_tensor)

    def kept(self) -> Iterator[tuple[Place, Any]]:
        """Attributes that were None and have a tensor or container now, or new items, with their values."""
        of_module = self._attribute is None
        for key, new in self._now().items():
            holds = isinstance(new, torch.Tensor | list | tuple | dict)
            if self._before.get(key) is None and (holds if of_module else key not in self._before):
                yield self._place(key), new

    def _has_changed(self) -> bool:
        now = self._now()
        return list(now) != list(self._before) or any(now[key] is not old for key, old in self._before.items())

    def restore(self) -> None:
        """Restore the attributes or the container; an unchanged list or dict is not touched."""
        if self._attribute is None:
            _restore_dict(self._held, self._before)
        elif self._has_changed():
            self._held.clear()
            if isinstance(self._held, dict):
                self._held.update(self._before)
            else:
                self._held.extend(self._before.values())


def _new_value(fqn: str, old: torch.Tensor, new: torch.Tensor | None) -> torch.Tensor:
    """The new value of a buffer. Raises `CaptureError` if it was removed or its shape or dtype changed."""
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        found = "removes it" if new is None else f"assigns {list(new.shape)} {new.dtype}"
        raise CaptureError(
            f"the buffer {fqn} is {list(old.shape)} {old.dtype}, and the forward {found}: "
            "a buffer keeps its shape and dtype from step to step."
        )
    placed = placed_as(new.detach(), old)
    if placed is None:
        raise CaptureError(f"the buffer {fqn} is a {type(old).__name__}, and the forward assigns a {type(new).__name__}")
    return placed.clone()  # the new value may itself be another buffer


def _restore_dict(now: dict[str, Any], before: dict[str, Any]) -> None:
    for name in now.keys() - before.keys():
        del now[name]
    now.update(before)
