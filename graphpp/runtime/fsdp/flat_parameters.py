"""One plain parameter for all parameters of a flat shard, for optimizers that treat each element alike.

- A flat parameter shares memory with the rows of its `DTensor` parameters, and its gradient with their gradients. Padding
  elements and their gradients are 0.
- When a step starts, a flat gradient that is None clears the gradients of its parameters, and the reverse. A parameter without
  a gradient in a step has gradient 0 in the flat one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from graphpp._torch.parallel.sharded_tensor import with_local
from graphpp.runtime.dtensors import local_tensor
from graphpp.runtime.fsdp.gather_parameters import FlatShard


@dataclass(frozen=True)
class FlatParameter:
    """A plain parameter, and the FQNs of the parameters whose rows it has; `shard` is None for one 0-dim parameter."""

    parameter: nn.Parameter
    fqns: tuple[str, ...]
    shard: FlatShard | None

    def rows(self, fqn: str, flat: torch.Tensor) -> torch.Tensor:
        """The rows of a parameter in a tensor with the flat parameter's layout."""
        return flat if self.shard is None else self.shard.local(fqn, flat)


class FlatParameters:
    def __init__(self, shards: Sequence[FlatShard], parameters: Mapping[str, nn.Parameter]) -> None:
        trained = {fqn: parameter for fqn, parameter in parameters.items() if parameter.requires_grad}
        self._parameters = trained
        self.flat: list[FlatParameter] = []
        for shard in shards:
            fqns = tuple(fqn for fqn in shard.layout.regions if fqn in trained)
            if fqns:
                self.flat.append(FlatParameter(nn.Parameter(shard.values), fqns, shard))
        for fqn in (fqn for fqn, parameter in trained.items() if not parameter.dim()):
            self.flat.append(FlatParameter(nn.Parameter(local_tensor(trained[fqn])), (fqn,), None))
        self._of = {fqn: flat for flat in self.flat for fqn in flat.fqns}
        for fqn, parameter in trained.items():
            if parameter.grad is not None:
                rows, parameter.grad = local_tensor(parameter.grad), None
                self.add(fqn, rows)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._of

    def __iter__(self) -> Iterator[tuple[tuple[str, ...], nn.Parameter]]:
        return ((flat.fqns, flat.parameter) for flat in self.flat)

    def begin(self) -> None:
        """Start a step: if the flat gradient, or all gradients of its parameters, were cleared, clear both."""
        for flat in self.flat:
            own = [self._parameters[fqn] for fqn in flat.fqns]
            if flat.parameter.grad is None or all(each.grad is None for each in own):
                self._clear(flat)

    def _clear(self, flat: FlatParameter) -> None:
        flat.parameter.grad = None
        for fqn in flat.fqns:
            self._parameters[fqn].grad = None

    def add(self, fqn: str, rows: torch.Tensor) -> None:
        flat, parameter = self._of[fqn], self._parameters[fqn]
        if flat.parameter.grad is None:
            flat.parameter.grad = torch.zeros_like(flat.parameter)
        own = flat.rows(fqn, flat.parameter.grad)
        own.add_(rows.view(own.shape))
        if parameter.grad is None:
            parameter.grad = with_local(parameter, own)
