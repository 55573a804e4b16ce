"""Memory for the parameters that a model spreads over ranks itself: `DTensor`s of this rank's parts, without values at first.

Contract
--------
- Each parameter is an `nn.Parameter` that is a `DTensor` with the mesh, placements, shape and strides of the model's own, which
  is on the meta device. It has the attributes and the need of a gradient of before.
- `take` gives a parameter values, and `install` puts all parameters into the model.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from graphpp._torch.parallel.sharded_tensor import dtensor_of, parameter_of
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.released import forget
from graphpp.runtime.shards.local_rows import local_tensor
from graphpp.runtime.shards.spread_tensors import SpreadTensor, spread_tensor


class SpreadParameters:
    """New parameters in the places of `DTensor`s without memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """`tensors`: `DTensor`s of the model's by FQN."""
        parts = {fqn: (tensor, spread_tensor(tensor)) for fqn, tensor in tensors.items()}
        self.parameters = {fqn: _made(tensor, part, device) for fqn, (tensor, part) in parts.items() if part is not None}

    def __contains__(self, fqn: str) -> bool:
        return fqn in self.parameters

    @torch.no_grad()
    def take(self, fqn: str, part: torch.Tensor) -> None:
        """Copy this rank's part of a parameter."""
        local_tensor(self.parameters[fqn]).copy_(part)

    def install(self, state: ModelState) -> None:
        """Put the parameters into the model, in the places of those that it has."""
        former = {fqn: state.tensor(fqn) for fqn in self.parameters}
        state.exchange({id(tensor): self.parameters[fqn] for fqn, tensor in former.items()})
        forget(((tensor, fqn) for fqn, tensor in former.items()), "pipe.materialize has put others in their places")


def _made(tensor: torch.Tensor, part: SpreadTensor, device: torch.device) -> nn.Parameter:
    local = torch.empty_strided(part.local.shape, part.local.stride(), dtype=tensor.dtype, device=device)
    made = parameter_of(dtensor_of(local, part.spread), requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    if tensor.requires_grad:
        made.grad_dtype = tensor.grad_dtype
    return made
