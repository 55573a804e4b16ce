"""Skip the calls of layers that another layer stands for while a model is traced.

`stand_ins` finds these layers before anything runs: siblings `<prefix>.<integer>` whose modules have the same classes, hooks,
plain attributes and layouts of tensors. Integers may differ by the distance of the layers, as their indices do. Layers of
several kinds may alternate in turns. Of each run of equal turns the first three and the last two are called; the last one
before the gap stands for the turns in it. If a call reads an attribute that differs between layers, such as an index, the
first turns are of at least seven layers: `shortened.py` compares the operations of the called turns one by one, so code that
treats every second to every sixth layer in another way is found out.

A call is skipped if its arguments are those of the stand-in's call: the results of the preceding layer where the stand-in had
those of its own preceding layer, else the same objects or equal plain values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from graphpp._torch.aot import answered
from graphpp._torch.pytree import tree_leaves

_BEFORE, _AFTER = 3, 2  # turns that are called before and after the skipped ones
_CALLED = 7  # layers that are called before them, at least, if they read their indices
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_REGISTRIES = frozenset(vars(nn.Module()))
_HOOKS = sorted(name for name in _REGISTRIES if name.endswith("_hooks"))

StandIns = Mapping[str, str]
"""The layers that may be skipped, in order, with the layers that stand for them; both by FQN."""


def stand_ins(model: nn.Module, longest: int) -> tuple[int, StandIns, StandIns]:
    """The number of layers in a turn, at most `longest`, that lets most layers be skipped; these layers; and those that may be
    skipped if layers read their indices."""
    lists = _siblings(model)
    facts = {name: list(_facts(model.get_submodule(name))) for names in lists for name in names}

    def found(length: int, reads: bool) -> StandIns:
        return dict(pair for names in lists for pair in _in_turns(facts, names, length, reads))

    length = max(range(1, longest + 1), key=lambda each: len(found(each, False)), default=0)
    return (length, found(length, False), found(length, True)) if length else (0, {}, {})


def _siblings(model: nn.Module) -> list[list[str]]:
    """The FQNs of siblings whose names are 0, 1, 2, .., by their order; none inside of another."""
    found: list[list[str]] = []
    for prefix, module in model.named_modules():  # parents first
        own = [name for name, child in module.named_children() if name.isdecimal()]
        names = [f"{prefix}.{name}".lstrip(".") for name in own if own == list(map(str, range(len(own))))]
        inside = any(f"{prefix}.".startswith(f"{name}.") for others in found for name in others)
        if len(names) > _BEFORE + _AFTER and not inside:
            found.append(names)
    return found


def _in_turns(
    facts: Mapping[str, Sequence[Any]], names: Sequence[str], length: int, reads: bool
) -> Iterator[tuple[str, str]]:
    alike = [at >= length and _alike(facts[names[at - length]], facts[name], length) for at, name in enumerate(names)]
    return ((names[at], names[other]) for at, other in _skipped(alike, length, called_before(length, reads)))


def called_before(length: int, reads: bool) -> int:
    """The turns of so many layers, which may read their indices, that are called before the skipped ones; the first turn may
    have other inputs."""
    return max(_BEFORE, -(-_CALLED // length)) if reads else _BEFORE


def _skipped(alike: Sequence[bool], length: int, before: int) -> Iterator[tuple[int, int]]:
    """`alike`: by layer, whether the layer one turn before is equal. A run begins at a multiple of `length`."""
    whole = [all(alike[at : at + length]) for at in range(0, len(alike) - length + 1, length)]
    first = 0
    for at in range(1, len(whole) + 1):
        if at == len(whole) or not whole[at]:
            for turn in range(first + before, at - _AFTER):
                yield from ((turn * length + own, (first + before - 1) * length + own) for own in range(length))
            first = at


def _facts(layer: nn.Module) -> Iterator[Any]:
    """The plain values that the code of a layer can read from the layer, and the identities of other objects."""
    for name, module in layer.named_modules():
        yield f"{name} of class {id(type(module))}"
        for store in (module._parameters, module._buffers):
            yield from (_layout(each, tensor) for each, tensor in store.items())
        yield from (str([(id(hook), key) for key, hook in enumerate(getattr(module, hooks).values())]) for hooks in _HOOKS)
        for attribute, value in vars(module).items():
            if attribute not in _REGISTRIES or attribute == "training":
                yield attribute
                yield from _values(value)


def _values(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield _layout("", value)
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _values(each)
    else:
        yield value if isinstance(value, _PLAIN) else f"object {id(value)}"


def _layout(name: str, tensor: torch.Tensor | None) -> str:
    own = tensor if tensor is None else (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
    return f"{name} {own}"


def _alike(one: Sequence[Any], other: Sequence[Any], distance: int) -> bool:
    return len(one) == len(other) and all(
        type(a) is type(b) and (a == b or (type(a) is int and b - a == distance)) for a, b in zip(one, other, strict=True)
    )


class _Watched:  # a descriptor, which comes before the attribute of a module
    def __init__(self, name: str, read: Callable[[], None]) -> None:
        self._name, self._read = name, read

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Any:
        if module is None or self._name not in vars(module):
            raise AttributeError(self._name)
        self._read()
        return vars(module)[self._name]

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value


def _unlike(model: nn.Module, stands_for: StandIns) -> set[tuple[type, str]]:
    """The attributes that differ between layers and those that stand for them, such as an index, by class."""
    layers = ((model.get_submodule(name).modules(), model.get_submodule(other).modules()) for name, other in stands_for.items())
    pairs = ((one, vars(other)) for each in layers for one, other in zip(*each, strict=True))
    own = ((type(one), name, value, others[name]) for one, others in pairs for name, value in vars(one).items())
    unlike = ((kind, name) for kind, name, *both in own if len({str([*_values(value)]) for value in both}) > 1)
    return {(kind, name) for kind, name in unlike if name not in _REGISTRIES}


class CalledOnce:
    """Within `skipping()`, calls of the keys of `stands_for` are skipped, with their hooks; once a layer has read its index,
    calls of the keys of `if_read` alone. `if_read=None`: of all keys, whatever their arguments. Of the model's last call:
    `skipped`, the layers that were skipped, in order; `again`: whether a layer was called twice; `reads`: whether a layer has
    read its index."""

    def __init__(self, model: nn.Module, stands_for: StandIns, if_read: StandIns | None = None) -> None:
        always, self.reads, self._if_read = if_read is None, False, if_read or {}
        self._indices = set() if always else _unlike(model, stands_for)
        names = {each for pairs in (stands_for, self._if_read) for pair in pairs.items() for each in pair}
        self._before = {} if always else {name: _preceding(name) for name in names}
        self._model, self.again = model, False
        self._names = {model.get_submodule(name): name for name in names.union(self._before.values())}
        self._stands_for, self._always = stands_for, always
        self._given, self._results = dict[str, list[Any]](), dict[str, Any]()
        self.skipped: dict[str, str] = {}

    @contextmanager
    def skipping(self) -> Iterator[None]:
        with ExitStack() as stack:
            for kind, name in self._indices:
                if hasattr(kind, name):
                    self._note_read()  # a default, or a property
                else:
                    setattr(kind, name, _Watched(name, self._note_read))
                    stack.callback(delattr, kind, name)
            stack.enter_context(answered(self._answer))
            yield

    def _note_read(self) -> None:
        self.reads, self._stands_for = True, self._if_read

    def _answer(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        name = self._names.get(module)
        if module is self._model:
            self.skipped, self.again, self._results = {}, False, {}
        if name is None:
            return call(module, *args, **kwargs)
        self.again |= name in self._results
        given, other = tree_leaves((args, kwargs)), self._stands_for.get(name)
        if other is not None and (self._always or self._repeats(name, other, given)):
            self.skipped[name] = other
            self._results[name] = self._results[other]
        else:
            self._given[name], self._results[name] = given, call(module, *args, **kwargs)
        return self._results[name]

    def _repeats(self, name: str, other: str, given: Sequence[Any]) -> bool:
        """Whether a call has the arguments that the stand-in's call had, some turns later."""
        before, now = (tree_leaves(self._results.get(self._before[each])) for each in (other, name))
        earlier = self._given.get(other, ())
        if len(earlier) != len(given) or len(before) != len(now):
            return False
        later = {id(old): new for old, new in zip(before, now, strict=True)}
        pairs = zip(earlier, given, strict=True)
        return all(later.get(id(a), a) is b or (type(a) in _PLAIN and type(a) is type(b) and a == b) for a, b in pairs)


def _preceding(name: str) -> str:
    prefix, _, last = name.rpartition(".")
    return f"{prefix}.{int(last) - 1}".lstrip(".")
