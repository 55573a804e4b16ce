"""Skip the calls of layers that another layer stands for while a model is traced.

`stand_ins` finds these layers before anything runs: siblings `<prefix>.<integer>` whose modules have the same classes, hooks,
plain attributes and layouts of tensors. Integers may differ by the distance of the layers, as their indices do. Layers of
several kinds may alternate in turns. Of each run of equal turns the first three, of at least seven layers, and the last two are
called; the last one before the gap stands for the turns in it. `shortened.py` compares the operations of the called turns one
by one, so code that treats every second to every sixth layer in another way, by its index, is found out.

A call is skipped if its arguments are those of the stand-in's call: the results of the preceding layer where the stand-in had
those of its own preceding layer, else the same objects or equal plain values. Torch handles each parameter of a model a dozen
times in a trace, so layers to skip have no submodules meanwhile, unless the model needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from graphpp._torch.aot import answered
from graphpp._torch.pytree import tree_leaves
from graphpp.errors import CaptureError

_BEFORE, _AFTER = 3, 2  # turns that are called before and after the skipped ones
_CALLED = 7  # layers that are called before them, at least
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_REGISTRIES = frozenset(vars(nn.Module()))
_HOOKS = sorted(name for name in _REGISTRIES if name.endswith("_hooks"))

StandIns = Mapping[str, str]
"""The layers that may be skipped, in order, with the layers that stand for them; both by FQN."""


def stand_ins(model: nn.Module, longest: int) -> tuple[int, StandIns]:
    """The number of layers in a turn, at most `longest`, that lets most layers be skipped; and these layers."""
    lists = _siblings(model)
    facts = {name: list(_facts(model.get_submodule(name))) for names in lists for name in names}
    lengths = range(1, longest + 1)
    found = {length: dict(pair for names in lists for pair in _in_turns(facts, names, length)) for length in lengths}
    return max(found.items(), key=lambda item: len(item[1]), default=(0, {}))


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


def _in_turns(facts: Mapping[str, Sequence[Any]], names: Sequence[str], length: int) -> Iterator[tuple[str, str]]:
    alike = [at >= length and _alike(facts[names[at - length]], facts[name], length) for at, name in enumerate(names)]
    return ((names[at], names[other]) for at, other in _skipped(alike, length))


def called_before(length: int) -> int:
    """The turns of so many layers that are called before the skipped ones; the first may have other inputs."""
    return max(_BEFORE, -(-_CALLED // length))


def _skipped(alike: Sequence[bool], length: int) -> Iterator[tuple[int, int]]:
    """`alike`: by layer, whether the layer one turn before is equal. A run begins at a multiple of `length`."""
    whole = [all(alike[at : at + length]) for at in range(0, len(alike) - length + 1, length)]
    first, before = 0, called_before(length)
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


class CalledOnce:
    """Within `skipping()`, calls of the keys of `stands_for` are skipped, with their hooks. `always`: whatever their arguments.
    `empty`: layers without submodules meanwhile; `refused`: whether a `CaptureError` was raised where the model needs them. Of
    the model's last call: `skipped`, the layers that were skipped, in order; `again`: whether a layer was called twice."""

    def __init__(self, model: nn.Module, stands_for: StandIns, *, always: bool, empty: Collection[str]) -> None:
        names = {*stands_for, *stands_for.values()}
        self._before = {} if always else {name: _preceding(name) for name in names}
        self._model, self.again, self.refused = model, False, False
        found = {name: model.get_submodule(name) for name in empty}  # the model may loop over the modules of a list
        self._emptied = {each: name for name, each in found.items() if not hasattr(each, "__iter__")}
        self._names = {model.get_submodule(name): name for name in names.union(self._before.values())}
        self._stands_for, self._always = stands_for, always
        self._given, self._results = dict[str, list[Any]](), dict[str, Any]()
        self.skipped: dict[str, str] = {}

    @contextmanager
    def skipping(self) -> Iterator[None]:
        parts = [each._modules.copy() for each in self._emptied]
        own = {id(tensor) for modules in parts for each in modules.values() if each is not None for tensor in _tensors(each)}
        try:
            for each in self._emptied:
                each._modules.clear()
            if not own.isdisjoint(map(id, _tensors(self._model))):
                self._refuse("another module has tensors of a layer that is not called")
            with answered(self._answer):
                yield
            for name, other in self._stands_for.items():
                if other in self._results and name not in self._results and name in self._emptied.values():
                    self._refuse(f"{name} is not called, and {other} is")
        finally:
            for each, modules in zip(self._emptied, parts, strict=True):
                each._modules.update(modules)

    def _refuse(self, why: str) -> NoReturn:
        self.refused = True
        raise CaptureError(f"cluster costs: {why}")  # `Shortening.needs_all`: another trace follows, with all submodules

    def _answer(self, module: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        name = self._names.get(module)
        if module is self._model:
            self.skipped, self.again, self._results = {}, False, {}
        if name is None:
            if module in self._emptied:
                self._refuse(f"{self._emptied[module]} is called in one of two traces")
            return call(module, *args, **kwargs)
        self.again |= name in self._results
        given, other = tree_leaves((args, kwargs)), self._stands_for.get(name)
        if other is not None and (self._always or self._repeats(name, other, given)):
            self.skipped[name] = other
            self._results[name] = self._results[other]
        elif module in self._emptied:
            self._refuse(f"{name} is called unlike {other}, which looks alike")
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


def _tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _preceding(name: str) -> str:
    prefix, _, last = name.rpartition(".")
    return f"{prefix}.{int(last) - 1}".lstrip(".")
