"""The operators that stand in a trace for the call of a repeated module, or mark its inputs and results.

Contract: all operators carry the number of a call in the `CallTable` of the trace that is running.

- `INPUTS` and `CONSTANTS` give the arguments of a traced call on, `RESULTS` and `CONSTANT_RESULTS` its results. Their backward
  is `INPUTS_GRAD` and `RESULTS_GRAD`, so the nodes of a call lie between operators in the forward and in the backward.
- `STAND_IN` takes the place of a call, and also takes the constants that the call reads, so that the trace has them. Its
  backward is `STAND_IN_GRAD`. `Call.gradients` guesses the strides of the gradients that the call makes. `copies.py` compares
  the guess with the traced calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphpp.capture.repeats.equal_modules import RepeatedModules
from graphpp.capture.repeats.exported_calls import ExportedCall

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
for _name in ("inputs", "constants", "results", "constant_results", "inputs_grad", "results_grad", "stand_in", "stand_in_grad"):
    _LIBRARY.define(f"repeated_{_name}(Tensor[] tensors, int call) -> Tensor[]")
INPUTS = torch.ops.graphpp.repeated_inputs.default  # marks the tensors that require grad among the arguments of a traced call
CONSTANTS = torch.ops.graphpp.repeated_constants.default  # marks the other ones
RESULTS = torch.ops.graphpp.repeated_results.default  # marks the results that require grad
CONSTANT_RESULTS = torch.ops.graphpp.repeated_constant_results.default  # marks the other ones
INPUTS_GRAD = torch.ops.graphpp.repeated_inputs_grad.default
RESULTS_GRAD = torch.ops.graphpp.repeated_results_grad.default
STAND_IN = torch.ops.graphpp.repeated_stand_in.default  # tensors: inputs, trained parameters, constants
STAND_IN_GRAD = torch.ops.graphpp.repeated_stand_in_grad.default


class DifferentError(Exception):
    """A call of a member of a group may not be replaced by another one."""

    def __init__(self, call: Call | ExportedCall, reason: str) -> None:
        super().__init__(f"{call.fqn} {reason}")
        self.group = call.group


@dataclass(frozen=True)
class Layout:
    """A tensor without its data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    view: bool = False

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        view = tensor._is_view()
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, gets_gradient(tensor), view)

    def empty(self) -> torch.Tensor:
        """A tensor of this layout, without the need of a gradient."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def gets_gradient(tensor: torch.Tensor) -> bool:
    """Whether operations on a tensor are recorded for a backward."""
    return tensor.requires_grad and torch.is_grad_enabled()


@dataclass
class CallKind:
    """Calls that differ in nothing but the member that is called: the traced ones and the others, and their results."""

    traced: list[Call] = field(default_factory=list)
    replaced: list[Call] = field(default_factory=list)
    results: tuple[Layout, ...] = ()


@dataclass(frozen=True)
class Call:
    """The call `number` of a trace; `inputs`: values that it reads, `trained`: parameters that get gradients from it."""

    number: int
    exported: ExportedCall
    kind: CallKind
    inputs: tuple[Layout, ...]
    trained: tuple[Layout, ...]
    trained_names: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]  # that only its code names, in the order in which it reads them

    @property
    def fqn(self) -> str:
        """The member that is called."""
        return self.exported.fqn

    @property
    def name(self) -> str:
        """The call among the calls around a node."""
        return self.exported.name

    @property
    def group(self) -> RepeatedModules:
        return self.exported.group

    @property
    def checkpoints(self) -> list[int]:
        """The numbers of the checkpointed calls around operations of the call."""
        return self.exported.checkpoints

    def gradients(self, given: Sequence[torch.Tensor]) -> list[Layout]:
        """The layouts of the gradients of inputs and parameters, for the given gradients of the results.

        The gradient of an input has the strides of the first given gradient of the same shape, as behind a residual connection,
        or else of the input; that of a parameter has the strides of the parameter.
        """
        strides = {tuple(tensor.shape): tensor.stride() for tensor in reversed(given)}
        inputs = [self.inputs[at] for at in self.inputs_with_grad()]
        return [*(replace(each, stride=strides.get(each.shape, each.stride)) for each in inputs), *self.trained]

    def inputs_with_grad(self) -> list[int]:
        """The indices of the inputs that get gradients."""
        return [at for at, each in enumerate(self.inputs) if each.requires_grad]


@dataclass
class CallTable:
    """The calls of repeated modules in one trace, in order.

    `arrived`: by operator and call the indices of its results that got gradients.
    """

    calls: list[Call] = field(default_factory=list)
    kinds: list[CallKind] = field(default_factory=list)
    arrived: dict[tuple[Any, int], list[int]] = field(default_factory=dict)


_current: ContextVar[CallTable] = ContextVar("repeated calls of the capture that is running")


@contextlib.contextmanager
def operators_of(calls: CallTable) -> Iterator[None]:
    """While open, the operators' results have the layouts of these calls."""
    token = _current.set(calls)
    try:
        yield
    finally:
        _current.reset(token)


def _same(tensors: Sequence[torch.Tensor], _: int) -> list[torch.Tensor]:
    return [Layout.of(tensor).empty() for tensor in tensors]


def _results(_: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [layout.empty() for layout in _current.get().calls[number].kind.results]


def _gradients(tensors: Sequence[torch.Tensor], number: int) -> list[torch.Tensor]:
    return [layout.empty() for layout in _current.get().calls[number].gradients(tensors)]


def _set_up(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    tensors, ctx.number = inputs
    ctx.needs = [tensor.requires_grad for tensor in tensors]
    ctx.set_materialize_grads(False)


def _set_up_stand_in(ctx: Any, inputs: tuple[Any, ...], output: list[torch.Tensor]) -> None:
    _set_up(ctx, inputs, output)
    layouts = _current.get().calls[ctx.number].kind.results
    constant = [tensor for tensor, layout in zip(output, layouts, strict=True) if not layout.requires_grad]
    ctx.mark_non_differentiable(*constant)


def _backward(operator: Any, gradient_operator: Any) -> Callable[..., Any]:
    """The backward of an operator: another operator from the gradients of all results that have one."""

    def backward(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> Any:
        arrived = [at for at, gradient in enumerate(gradients) if gradient is not None]
        _current.get().arrived[operator, ctx.number] = arrived
        found = iter(gradient_operator([gradients[at] for at in arrived], ctx.number))
        if operator is not STAND_IN:  # a marker: the gradients of its results are those of its inputs
            return [next(found) if at in arrived else None for at in range(len(gradients))], None
        call = _current.get().calls[ctx.number]
        if sum(ctx.needs) != len(call.inputs_with_grad()) + len(call.trained):
            raise DifferentError(call, "takes other tensors that require grad in the joint trace")
        return [next(found) if needs else None for needs in ctx.needs], None

    return backward


for _operator, _fake in (
    (INPUTS, _same), (CONSTANTS, _same), (RESULTS, _same), (CONSTANT_RESULTS, _same), (INPUTS_GRAD, _same),
    (RESULTS_GRAD, _same), (STAND_IN, _results), (STAND_IN_GRAD, _gradients),
):  # fmt: skip
    torch.library.register_fake(_operator.name(), _fake, lib=_LIBRARY)
for _operator, _grad, _context in (
    (INPUTS, INPUTS_GRAD, _set_up), (RESULTS, RESULTS_GRAD, _set_up), (STAND_IN, STAND_IN_GRAD, _set_up_stand_in)
):  # fmt: skip
    torch.library.register_autograd(_operator.name(), _backward(_operator, _grad), setup_context=_context, lib=_LIBRARY)
