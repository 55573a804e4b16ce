"""The gradients of whole parameters: from the sums of a rank's stages to `param.grad`.

Contract
--------
- `begin` gives each stage's accumulator what `param.grad` holds already. `reduce` starts to average a stage's sums over the
  replicas, once per step. `finish` adds up the partial sums of tied parameters, averages them too, and sets `param.grad`.
- The gradient of a `DTensor` parameter of the model's is a `DTensor` of the same placements.
- All ranks of a pipeline call `finish` once per training step; `reduce` is called by all replicas in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from graphpp._torch.parallel.sharded_tensor import with_local
from graphpp.parallel.data_parallel import Replicas
from graphpp.runtime.gradients.accumulate import Accumulator, dtype_of_sum
from graphpp.runtime.gradients.tied import TiedReduction
from graphpp.runtime.shards.layer_parts import local_gradient
from graphpp.runtime.shards.local_rows import local_tensor


class WholeGradients:
    """The gradients of one rank's stages, where the rank holds whole parameters, or those parts of them that the model has."""

    def __init__(
        self,
        stages: Mapping[int, Accumulator],
        tied: TiedReduction,
        replicas: Replicas,
        tensor: Callable[[str], torch.Tensor],
        sum_dtype: torch.dtype | None,
    ) -> None:
        """`stages`: the sums of each local stage; `tensor` gives a parameter by FQN; `sum_dtype`: as in `RunnerConfig`."""
        self._stages, self._tied, self._replicas = stages, tied, replicas
        self._tensor, self._sum_dtype = tensor, sum_dtype
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._reduced = set[int]()

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin a step. `parameters`: those of the rank's stages, by FQN."""
        self._reduced.clear()
        self._parameters = parameters
        for sums in self._stages.values():
            own = {fqn: parameters[fqn] for fqn in sums.fqns}
            grads = {fqn: local_gradient(fqn, each) for fqn, each in own.items() if fqn not in self._tied.contributors}
            dtypes = {fqn: dtype_of_sum(parameter, self._sum_dtype) for fqn, parameter in own.items()}
            sums.start({fqn: grad for fqn, grad in grads.items() if grad is not None}, dtypes)

    def reduce(self, stage: int) -> None:
        """Start to average a stage's gradients over the replicas, but for those of tied parameters."""
        if stage not in self._reduced:
            self._reduced.add(stage)
            self._replicas.start(self._stages[stage].sums[fqn] for fqn in self._own(stage))

    def finish(self) -> None:
        """Set `param.grad` of all parameters that have a gradient."""
        for stage in self._stages:
            self.reduce(stage)
        tied = self._tied.reduce(lambda stage, fqn: self._stages[stage].sums[fqn], self._buffer_for_sum)
        self._replicas.start(tied.values())
        self._replicas.finish()
        for stage, sums in self._stages.items():
            for fqn in self._own(stage):
                parameter, total = self._parameters[fqn], sums.sums[fqn]
                wanted = parameter.grad_dtype
                total = total if wanted is None or total.dtype is wanted else total.to(dtype=wanted)
                parameter.grad = with_local(parameter, total)
        for fqn, total in tied.items():
            parameter = self._tensor(fqn)
            before = local_gradient(fqn, parameter)
            added = total.to(dtype=parameter.grad_dtype) if before is None else before.add_(total)
            parameter.grad = with_local(parameter, added)
        self._end()

    def drop(self) -> None:
        """Drop the gradients of a step that failed."""
        self._replicas.drop()
        self._end()

    def _end(self) -> None:
        self._parameters = {}
        for sums in self._stages.values():
            sums.start({})

    def _own(self, stage: int) -> list[str]:
        """FQNs of a stage's gradients that no other stage contributes to, sorted: replicas may make them in another order."""
        return sorted(fqn for fqn in self._stages[stage].sums if fqn not in self._tied.contributors)

    def _buffer_for_sum(self, fqn: str) -> torch.Tensor:
        """New memory for another rank's partial sum of a parameter's gradients."""
        own = local_tensor(self._tensor(fqn))
        return torch.empty(own.shape, dtype=dtype_of_sum(own, self._sum_dtype), device=own.device)
