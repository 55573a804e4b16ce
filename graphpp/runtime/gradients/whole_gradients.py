"""The gradients of whole parameters: from the sums of a rank's stages to `param.grad`.

- `begin` gives each stage's accumulator the present `param.grad`. `reduce` starts to average a stage's sums over the replicas,
  once per step. `finish` adds up the partial sums of tied parameters, averages them too, and sets `param.grad`. The averages
  of tied parameters, of rows, of experts and of gradients that are partial over `tp` do not start from `param.grad`: they are
  added to it at the end.
- The gradient of a `DTensor` parameter of the model is a `DTensor` of the same placements.
- All ranks of a pipeline call `finish` once per training step; all replicas call `reduce` in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence

import torch

from graphpp._torch.parallel.sharded_tensor import are_plain, with_local
from graphpp.parallel.data_parallel import Replicas
from graphpp.runtime.dtensors import local_gradient, local_tensor, value_of
from graphpp.runtime.gradients.accumulate import Accumulator, dtype_of_sum
from graphpp.runtime.gradients.tied import PartialSums, TiedReduction
from graphpp.runtime.parameter_rows import rows_in


class WholeGradients:
    """The gradients of one rank's stages with whole parameters, or with the model's own local parts."""

    def __init__(
        self,
        stages: Mapping[int, Accumulator],
        tied: TiedReduction,
        replicas: Replicas,
        tensor: Callable[[str], torch.Tensor],
        sum_dtype: torch.dtype | None,
        experts: Collection[str],
        partial: PartialSums,
    ) -> None:
        """`stages`: the sums of each local stage; `tensor` gives a parameter by FQN; `experts`: FQNs of experts' parameters."""
        self._stages, self._tied, self._replicas, self._experts = stages, tied, replicas, frozenset(experts)
        self._tensor, self._sum_dtype, self._partial = tensor, sum_dtype, partial
        # The sums of these start at 0, and the average of the step is added to `param.grad`.
        rows = [fqn for sums in stages.values() for fqn in sums.fqns if rows_in(fqn) is not None]
        self._added_at_end = self._experts.union(tied.contributors, partial.fqns, rows)
        self._parameters: Mapping[str, torch.Tensor] = {}
        self._plain = True  # whether no parameter is a `DTensor`
        self._reduced = set[int]()

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin a step. `parameters`: of the rank's stages, by FQN."""
        self._reduced.clear()
        self._parameters, self._plain = parameters, are_plain(parameters.values())
        for sums in self._stages.values():
            own = {fqn: parameters[fqn] for fqn in sums.fqns}
            known = {fqn: each for fqn, each in own.items() if each.grad is not None and fqn not in self._added_at_end}
            grads = {fqn: local_gradient(fqn, each) for fqn, each in known.items()}
            dtypes = {fqn: dtype_of_sum(parameter, self._sum_dtype) for fqn, parameter in own.items()}
            sums.start({fqn: grad for fqn, grad in grads.items() if grad is not None}, dtypes)

    def reduce(self, stage: int, whole: bool = False) -> None:
        """Start to average a stage's gradients over the replicas; tied parameters follow in `finish`. `whole` has no effect."""
        if stage not in self._reduced:
            self._reduced.add(stage)
            sums = self._stages[stage].sums
            self._partial.add_up(sums)
            # sorted: replicas may make them in another order
            self._average(sorted(sums.keys() - self._tied.contributors.keys()) if self._replicas.several else [], sums)

    def finish(self) -> None:
        for stage in self._stages:
            self.reduce(stage)
        tied = self._tied.reduce(lambda stage, fqn: self._stages[stage].sums[fqn], self._buffer_for_sum)
        self._average(list(tied), tied)
        self._replicas.finish()
        for sums in self._stages.values():
            for fqn, total in sums.sums.items():
                if fqn not in self._added_at_end:
                    self._set(self._parameters[fqn], total)
                elif fqn not in self._tied.contributors:
                    self._add(fqn, total)
        for fqn, total in tied.items():
            self._add(fqn, total)
        self._end()

    def drop(self) -> None:
        self._replicas.drop()
        self._end()

    def _end(self) -> None:
        self._parameters = {}
        for sums in self._stages.values():
            sums.start({})

    def _set(self, parameter: torch.Tensor, total: torch.Tensor) -> None:
        """Set `param.grad` to a sum that includes the present gradient, which keeps its memory."""
        before = parameter.grad
        if before is None:
            wanted = parameter.grad_dtype
            own = total if wanted is None or total.dtype is wanted else total.to(dtype=wanted)
            parameter.grad = own if self._plain else with_local(parameter, own)
        elif before is not total:
            local_tensor(before).copy_(total)

    def _add(self, fqn: str, total: torch.Tensor) -> None:
        parameter, rows = self._tensor(fqn), rows_in(fqn)
        before = local_gradient(fqn, parameter)
        if rows is not None:
            before = torch.zeros_like(parameter, dtype=parameter.grad_dtype) if before is None else before
            before[rows.start : rows.stop].add_(total)
            parameter.grad = before
            return
        added = total.to(dtype=parameter.grad_dtype) if before is None else before.add_(total)
        parameter.grad = with_local(parameter, added)

    def _average(self, fqns: Sequence[str], sums: MutableMapping[str, torch.Tensor]) -> None:
        if not self._experts:
            self._replicas.start(sums, fqns)
            return
        self._replicas.start(sums, [fqn for fqn in fqns if fqn not in self._experts])
        self._replicas.start_of_experts(sums, [fqn for fqn in fqns if fqn in self._experts])

    def _buffer_for_sum(self, fqn: str) -> torch.Tensor:
        own = value_of(fqn, self._tensor(fqn))
        return torch.empty(own.shape, dtype=dtype_of_sum(own, self._sum_dtype), device=own.device)
