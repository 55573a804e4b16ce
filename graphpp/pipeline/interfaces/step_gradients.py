"""The gradients of one step, kept apart from `param.grad` until a backward asks for them.

Contract: inside `kept_apart` every gradient of this rank is None, so a step copies nothing; afterwards each `param.grad` is the
object of before, also if the step raised. `deliver` puts a gradient in place where `param.grad` is None, and adds it otherwise.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from graphpp._torch.autograd import call_gradient_hooks
from graphpp.errors import GraphPPError
from graphpp.runtime.fsdp.flat_parameters import FlatParameter


class StepGradients:
    """`parameters`: this rank's, by FQN. `flat`: its flat parameters, whose gradients share memory with the others'."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], flat: Sequence[FlatParameter]) -> None:
        self._parameters, self._flat = parameters, flat
        self._made: dict[nn.Parameter, torch.Tensor] | None = None
        self.hooked: Collection[str] = ()  # FQNs of parameters whose gradient hooks `deliver` calls

    @contextlib.contextmanager
    def kept_apart(self) -> Iterator[None]:
        everything = [*self._parameters.values(), *(flat.parameter for flat in self._flat)]
        before = [parameter.grad for parameter in everything]
        for parameter in everything:
            parameter.grad = None
        try:
            yield
            self._made = {parameter: parameter.grad for parameter in everything if parameter.grad is not None}
        finally:
            for parameter, gradient in zip(everything, before, strict=True):
                parameter.grad = gradient

    def deliver(self, factor: float) -> None:
        """Add the gradients, times `factor`, to `param.grad`, and call the hooks of parameters.

        Raises `GraphPPError` at a second call: the first one has put the gradients' memory in place.
        """
        made, self._made = self._made, None
        if made is None:
            raise GraphPPError("a second backward of one loss: a step keeps its gradients for one; call the module again")
        shared = set[nn.Parameter]()  # their gradients are rows of a flat gradient
        for flat in self._flat:
            own = [flat.parameter, *(self._parameters[fqn] for fqn in flat.fqns)]
            shared.update(own)
            if any(parameter.grad is None for parameter in own):
                flat.parameter.grad = None
            _add(flat.parameter, made, factor)
            for parameter in own if flat.parameter.grad is made.get(flat.parameter) else ():
                parameter.grad = made.get(parameter)
        for parameter in made:
            if parameter not in shared:
                _add(parameter, made, factor)
        call_gradient_hooks(parameter for fqn, parameter in self._parameters.items() if fqn in self.hooked)


def _add(parameter: nn.Parameter, made: Mapping[nn.Parameter, torch.Tensor], factor: float) -> None:
    gradient = made.get(parameter)
    if gradient is None:
        return
    if factor != 1:
        gradient.mul_(factor)
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
