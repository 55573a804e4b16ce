"""Note the operators of forward and loss on fake tensors, to find out later whether the same code still computes the same.

Contract
--------
- `note_operators` runs forward and loss once as a capture does, makes no graph, and leaves the model unchanged. It returns an
  `Operation` for each operator that ran: its arguments, with plain numbers as text and tensors by origin (parameter or buffer
  by FQN, input by path, number of the operation that made it, constant), and the layouts of its results.
- Two runs have equal operations if code and state are unchanged. A constant equals another one in the same memory, whose values
  the graph reads in each step, and one with the values that the first had when it was noted.
- `CaptureError` is raised where the code cannot run on fake tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from graphpp._torch import aot, pytree
from graphpp.capture.source_lines import calling_line, source_line

_SHOWN = 4  # constants of at most so many elements are shown with their values
_COPIED = 4_096  # constants of at most so many elements are compared with a copy


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that belongs neither to the model nor to the call, and its values when it was noted."""

    tensor: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Constant:
        with aot.no_modes():
            return cls(tensor, tensor.detach().clone() if tensor.numel() <= _COPIED else tensor)

    def matches(self, later: Constant) -> bool:
        if self.tensor is later.tensor or _layout(self.tensor) != _layout(later.tensor):
            return self.tensor is later.tensor
        return _address(self.tensor) == _address(later.tensor) or bool(torch.equal(self.values, later.values))

    def __str__(self) -> str:
        values = self.values.tolist() if self.values.numel() <= _SHOWN and not self.values.is_meta else ""
        return f"a constant {_layout(self.tensor)} {values}".rstrip()


@dataclass(frozen=True)
class Operation:
    """One operator that ran. `line`: the user's source line, where lines are noted."""

    operator: str
    arguments: str
    results: str
    constants: tuple[Constant, ...] = field(default=(), compare=False)
    line: str = field(default="", compare=False)

    def same(self, later: Operation) -> bool:
        return self == later and all(one.matches(other) for one, other in zip(self.constants, later.constants, strict=True))

    def __str__(self) -> str:
        constants = f" with {', '.join(map(str, self.constants))}" if self.constants else ""
        return f"{self.operator}({self.arguments}){constants}"


def first_difference(before: Sequence[Operation], now: Sequence[Operation]) -> int | None:
    """The index of the first operation that differs, or None."""
    pairs = enumerate(zip_longest(before, now))
    return next((at for at, (old, new) in pairs if old is None or new is None or not old.same(new)), None)


class OperatorNotes(aot.DispatchMode):
    """While active, notes every operator of this thread. `names`: the names of known tensors."""

    supports_higher_order_operators = True

    def __init__(self, *, lines: bool) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._lines = lines
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # so that no `id` is reused

    def name(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._alive.append(dict(tensors))
        self._names |= {id(tensor): name for name, tensor in tensors.items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        constants: list[Constant] = []
        arguments = f"{self._text(args, constants)[1:-1]}{self._text(kwargs, constants) if kwargs else ''}"
        line = source_line(calling_line()) if self._lines else ""
        found = function(*args, **(kwargs or {}))
        results = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        number = len(self.operations)
        mode = "" if torch.is_grad_enabled() else " without grad"
        layouts = ", ".join(map(_layout, results)) + mode
        self.operations.append(Operation(str(function), arguments, layouts, tuple(constants), line))
        self.name({f"%{number}.{at}": tensor for at, tensor in enumerate(results)})
        return found

    def _text(self, value: Any, constants: list[Constant]) -> str:
        """An argument as text; adds the constants in it to `constants`."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._names and aot.is_fake(value):
                return f"a tensor {_layout(value)} of an earlier trace"
            if id(value) not in self._names:
                constants.append(Constant.of(value))
            return self._names.get(id(value), "constant")
        if isinstance(value, Mapping):
            return f"{{{', '.join(f'{key}: {self._text(each, constants)}' for key, each in value.items())}}}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(self._text(each, constants) for each in value)}]"
        return value.__qualname__ if callable(value) and hasattr(value, "__qualname__") else str(value)


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _address(tensor: torch.Tensor) -> Any:
    strided = tensor.layout is torch.strided and not tensor.is_meta
    return (tensor.data_ptr(), tensor.stride()) if strided and tensor.numel() else id(tensor)
