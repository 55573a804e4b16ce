"""Note the operators of forward and loss on fake tensors, to find out later whether the same code still computes the same.

Contract
--------
- `note_operators` runs forward and loss once as a capture does, makes no graph, and leaves the model unchanged. It notes an
  `Operation` for each operator that ran: its arguments, with plain numbers as text and tensors by origin (parameter or buffer
  by FQN, input by path, number of the operation that made it, constant), and the layouts of its results.
- `Operations.asked` has the constants of which the code reads numbers (`.item()`), which a trace makes part of the graph.
- Two runs have equal operations if code and state are unchanged. A constant equals another one in the same memory, whose values
  the graph reads in each step, and one with the values that the first had when it was noted.
- `CaptureError` is raised where the code cannot run on fake tensors, or calls an operator with a body.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from graphpp._torch import aot, pytree
from graphpp._torch.export_thread import traces_in_this_thread
from graphpp._torch.operators import flex_attention
from graphpp._torch.parallel.in_place_collectives import as_functional
from graphpp._torch.parallel.sharded_tensor import is_dtensor_class
from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp._torch.tensor_subclass import wraps_tensors
from graphpp.batch.microbatch import Microbatch, tensors_by_path
from graphpp.capture.eager_branches import Answering, as_eager_first
from graphpp.capture.explain_errors import explain_errors
from graphpp.capture.fake_state import fake_state
from graphpp.capture.loss import LossFunction
from graphpp.capture.outside_state import refuse_outside_state
from graphpp.capture.refusals import refuse_during_trace
from graphpp.capture.source_lines import calling_line, source_line, user_line
from graphpp.capture.tensor_objects import RegionsTraced, end_trace
from graphpp.capture.tensor_parallel.local_shards import SpreadTensors
from graphpp.capture.trace import TracedStep
from graphpp.errors import CaptureError

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
        here, there = self.tensor, later.tensor
        if here is there or _layout(here) != _layout(there) or here.device != there.device:
            return here is there
        return _address(here) == _address(there) or bool(torch.equal(self.values, later.values))

    def __str__(self) -> str:
        values = self.values.tolist() if self.values.numel() <= _SHOWN and not self.values.is_meta else ""
        return f"a constant {_layout(self.tensor)} {values}".rstrip()


@dataclass(frozen=True)
class Operation:
    """One operator that ran. `line`: the user's source line, empty if a library called it."""

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


@dataclass(frozen=True)
class Operations:
    ran: Sequence[Operation]
    asked: Sequence[torch.Tensor]


@traces_in_this_thread()
def note_operators(
    model: nn.Module,
    loss: LossFunction | None,
    example: Microbatch,
    device: torch.device,
    *,
    training: bool,
    param_dtype: torch.dtype | None = None,
) -> Operations:
    """The operations of forward and loss on fake tensors. Arguments as for `capture`.

    Dispatch modes around the call, such as a counter of FLOPs, do not see these operations.
    """
    step, mode, spread = TracedStep(model, loss, example, training), aot.fake_mode(), SpreadTensors.of(model)
    inputs: dict[str, torch.Tensor] = {}

    def run(answering: Answering) -> Operations:
        notes = OperatorNotes()
        step.begin(())
        patches = explain_errors(), answering(), refuse_during_trace(), refuse_outside_state(), spread.read_as_dtensors()
        with contextlib.ExitStack() as stack:
            for each in (*patches, flex_attention.trains_on_cpu(), mode):
                stack.enter_context(each)
            notes.name({**inputs, **dict(model.named_buffers()), **dict(model.named_parameters())})
            with notes, aot.regions_replaced(end_trace):
                step(*inputs.values())
        return Operations(notes.operations, notes.read if notes.asked else ())

    grad = contextlib.nullcontext() if training else torch.no_grad()
    quick, functional = aot.quick(), as_functional(user_line)
    with aot.no_modes(), quick, functional, fake_state(model, mode, device, param_dtype) as objects, grad:
        inputs |= {path: aot.fake_like(mode, tensor, device) for path, tensor in tensors_by_path(example).items()}
        step.objects = objects.with_attributes_alone() if spread.places else objects
        try:
            return as_eager_first(run, aot.as_under_export)
        except RegionsTraced as ended:
            raise CaptureError(f"they call an operator with a body: {ended}") from ended


def first_difference(before: Operations, now: Operations) -> int | None:
    """The index of the first operation that differs, or None."""
    pairs = enumerate(zip_longest(before.ran, now.ran))
    return next((at for at, (old, new) in pairs if old is None or new is None or not old.same(new)), None)


_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e-?\d+)?")


def same_but_for_sizes(one: Operations, other: Operations, sizes: Iterable[tuple[int, int]]) -> bool:
    """Whether two calls with other sizes ran the same operators, and the sizes explain all numbers that differ.

    `sizes`: for each dimension its size in both calls. Two numbers are explained if they differ by as much as two sizes do, are
    the same multiple of them, or the same number divided by them.
    """
    differing = {pair for pair in sizes if pair[0] != pair[1]}

    def explained(x: float, y: float) -> bool:
        multiples = ((x / a == y / b and (x / a).is_integer()) or math.isclose(x * a, y * b) for a, b in differing if a and b)
        return x == y or any(x - y == a - b for a, b in differing) or any(multiples)

    for first, second in zip_longest(one.ran, other.ran):
        if first is None or second is None or first.operator != second.operator:
            return False
        texts = [f"{each.arguments} {each.results}" for each in (first, second)]
        words, numbers = ([_NUMBER.sub("", text) for text in texts], [map(float, _NUMBER.findall(text)) for text in texts])
        if words[0] != words[1] or not all(map(explained, *numbers)):
            return False
        if not all(map(Constant.matches, first.constants, second.constants)):
            return False
    return True


class OperatorNotes(aot.DispatchMode):
    """While active, notes every operator of this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.read: list[torch.Tensor] = []  # the constants with which operators computed, without other tensors
        self.asked = False  # whether the code read a number of a constant, or of such a result
        self._names: dict[int, str] = {}
        self._alive: list[Any] = []  # so that no `id` is reused

    def name(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._alive.append(dict(tensors))
        self._names |= {id(tensor): name for name, tensor in tensors.items()}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "prim":  # asks for the device of a tensor
            return function(*args, **(kwargs or {}))
        if any(wraps_tensors(kind) and not is_dtensor_class(kind) for kind in types):
            return NotImplemented  # the class's own operators are noted
        constants: list[Constant] = []
        arguments = f"{self._text(args, constants)[1:-1]}{self._text(kwargs, constants) if kwargs else ''}"
        found = self._run(function, args, kwargs or {})
        results = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)]
        number = len(self.operations)
        mode = "" if torch.is_grad_enabled() else " without grad"
        layouts = ", ".join(map(_layout, results)) + mode
        self.operations.append(Operation(str(function), arguments, layouts, tuple(constants), source_line(calling_line())))
        self.name({f"%{number}.{at}": tensor for at, tensor in enumerate(results)})
        return found

    def _run(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator; on constants alone with their values, since export gives the code numbers of constants too."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not tensors or any(map(aot.is_fake, tensors)) or not aot.is_pure(function):
            return function(*args, **kwargs)
        self.asked |= function is torch.ops.aten._local_scalar_dense.default
        self.read += tensors
        with aot.no_modes():
            return function(*args, **kwargs)

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
        if type(value) in SYMBOLIC:  # a size that an earlier trace left in an object
            return str(hint(value))
        return str(value)


def _layout(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _address(tensor: torch.Tensor) -> Any:
    strided = tensor.layout is torch.strided and not tensor.is_meta
    return (tensor.data_ptr(), tensor.stride()) if strided and tensor.numel() else id(tensor)
