"""Gradient norms and clipping over all ranks.

Contract:
- A rank computes the norms of its own parameters, an all-reduce gives every rank all norms in the model's order, and the total
  is computed from them as in `torch.nn.utils.clip_grad_norm_`: bit-equal to torch's on the whole model, where no parameter is
  spread over ranks. A parameter on several ranks counts once. Every rank returns the same norm.
- Of a parameter spread by `dp_shard`, `tp` or `ep`, or over the pipeline (`memory.word_parts`), a rank computes the norm of
  its part. The ranks exchange these norms, first along `dp_shard`, and join them in one order, so the total is equal on all
  ranks, for every split and schedule of one mesh.
- The ranks exchange which parameters have gradients, and the dtypes (`RankGradients.codes`), without waiting for the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
import torch.distributed as dist

from graphpp._torch.distributed import all_gather_many, foreach_norm
from graphpp._torch.parallel.sharded_tensor import is_dtensor
from graphpp.arguments import FLAG, require
from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import RankPlace
from graphpp.runtime.dtensors import is_cut_along, is_expert, is_over_stages, is_spread_over, local_tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES, 1)}
_NO_GRADIENT = 0


class Parts(NamedTuple):
    """The ranks that hold other parts of the parameters, the positions of the parameters that every rank holds whole, and of
    those of which these ranks do not hold the parts of one whole: a rank keeps its own norms of them."""

    group: dist.ProcessGroup
    whole: tuple[int, ...]
    apart: tuple[int, ...] = ()


@dataclass(frozen=True)
class RankGradients:
    """The gradients of this rank's parameters, in the model's order.

    `counted`: the gradients that this rank counts, by position. `over_stages`: positions of the parameters of which each
    rank of the pipeline has some rows; every rank counts its own. `codes`: per parameter of the model
    1 + the index of its gradient's dtype in `_DTYPES`; 0 where this rank counts no gradient. `parts`: one entry per mesh
    dimension that spreads parameters; the dimension that cuts last comes first.
    """

    parameters: Sequence[torch.Tensor]
    counted: Mapping[int, torch.Tensor]
    codes: tuple[int, ...]
    place: RankPlace
    parts: tuple[Parts, ...]
    over_stages: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, held: Mapping[str, torch.Tensor], order: Mapping[str, int], owners: Mapping[str, Sequence[int]], place: RankPlace
    ) -> RankGradients:
        """The gradients of this rank's parameters (`held`, by FQN). `order`: the positions of all parameters of the model.

        The first of a parameter's `owners` counts its norm.
        """
        parts = list(_parts({order[fqn]: each for fqn, each in held.items()}, place))
        parameters = list(held.values())
        if parts or any(is_dtensor(each.grad) for each in parameters):
            parameters = [_part_of(each) for each in parameters]
        over_stages = {order[fqn] for fqn, each in held.items() if is_over_stages(each)}
        counts = [(order[fqn], owners[fqn][0], each.grad) for fqn, each in zip(held, parameters, strict=True)]
        gradients = {at: gradient for at, owner, gradient in counts if owner == place.rank or at in over_stages}
        counted = {position: gradient for position, gradient in gradients.items() if gradient is not None}
        codes = [_NO_GRADIENT] * len(order)
        for position, gradient in counted.items():
            if gradient.dtype not in _CODES:
                fqn = next(fqn for fqn, at in order.items() if at == position)
                raise GraphPPError(f"{fqn}: its gradient is {gradient.dtype}, which has no norm: keep its gradients in float32")
            codes[position] = _CODES[gradient.dtype]
        return cls(parameters, counted, tuple(codes), place, tuple(parts), tuple(sorted(over_stages)))

    def reduce_(self, tensor: torch.Tensor, how: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        group = self.place.group
        if group is not None:
            dist.all_reduce(tensor, how, group=group)

    def present(self) -> list[torch.Tensor]:
        return [each.grad for each in self.parameters if each.grad is not None]


@dataclass(frozen=True)
class Clipping:
    """The arguments of `clip_grad_norm_`, which all ranks must have alike."""

    max_norm: float
    norm_type: float
    error_if_nonfinite: bool = False


def read_clipping(max_norm: object, norm_type: object, error_if_nonfinite: bool = False) -> Clipping:
    """The checked arguments of `clip_grad_norm_`. Raises `GraphPPError` for numbers that are no norm or no order."""
    most = _number("max_norm", "a number of 0 or more", max_norm)
    order = _number("norm_type", "the order of a norm, a number of 0 or more, or float('inf')", norm_type)
    require(GraphPPError, "error_if_nonfinite", FLAG, error_if_nonfinite)
    return Clipping(most, order, error_if_nonfinite)


def _number(name: str, takes: str, value: object) -> float:
    try:
        known = isinstance(value, int | float | str | torch.Tensor) and not isinstance(value, bool)
        found = float(value) if known else math.nan  # type: ignore[arg-type]
    except (ValueError, RuntimeError, OverflowError):
        found = math.nan
    if math.isnan(found) or found < 0:
        raise GraphPPError(f"{name}: take {takes}, got {value!r}")
    return found


def total_norm(gradients: RankGradients, norm_type: float) -> torch.Tensor:
    """The norm of all gradients of the model (0-dim, on this rank's device)."""
    norms, place = _own_norms(gradients, norm_type), gradients.place
    gradients.reduce_(norms)
    order = _order_of_torch(tuple(place.agreement(place.model_parallel).largest(gradients.codes)), norms.device)
    if order is None:
        return torch.tensor(0.0, device=norms.device)
    dtype, places = order
    total: torch.Tensor = torch.linalg.vector_norm(norms[places].to(dtype), norm_type)
    return total


def _own_norms(gradients: RankGradients, norm_type: float) -> torch.Tensor:
    """The norms that this rank counts, float64 [parameters of the model]; 0 for every other parameter."""
    table = torch.zeros(len(gradients.codes), dtype=torch.float64, device=gradients.place.device)
    counted = gradients.counted
    if gradients.parts:  # a rank may have no elements of a parameter
        counted = {place: gradient for place, gradient in counted.items() if gradient.numel()}
    dtypes = {gradient.dtype for gradient in counted.values()}
    for dtype in dtypes:
        one = len(dtypes) == 1
        chosen = {place: gradient for place, gradient in counted.items() if one or gradient.dtype is dtype}
        norms = torch.stack(list(foreach_norm(list(chosen.values()), norm_type)))
        table.index_copy_(0, _places(tuple(chosen), table.device), norms.to(table.device, torch.float64))
    for parts in gradients.parts:
        table = _over_parts(table, parts, norm_type)
    if gradients.over_stages:
        assert gradients.place.group is not None, "rows are cut over the ranks of a pipeline"
        rows = _places(gradients.over_stages, table.device)
        joined = _over_parts(table[rows], Parts(gradients.place.group, ()), norm_type)
        table[rows] = joined if gradients.place.rank == 0 else 0.0
    return table


def _over_parts(table: torch.Tensor, parts: Parts, norm_type: float) -> torch.Tensor:
    found = table.new_empty((dist.get_world_size(parts.group), len(table)))
    all_gather_many([found], [table], parts.group).wait()
    joined = torch.linalg.vector_norm(found, norm_type, dim=0) if norm_type else found.sum(0)
    for positions, values in ((parts.whole, found[0]), (parts.apart, table)):
        places = _places(positions, table.device)
        joined.index_copy_(0, places, values[places])
    return joined


def _parts(parameters: Mapping[int, torch.Tensor], place: RankPlace) -> Iterator[Parts]:
    """The parts of this rank's parameters, by position: first of those that are no experts, then of experts."""
    experts = tuple(at for at, each in parameters.items() if is_expert(each, place))
    others = tuple(at for at in parameters if at not in experts)
    if place.sharding is not None:
        yield Parts(place.sharding.group, tuple(at for at in others if not parameters[at].dim()), experts)
    if place.tp_group is not None:
        yield Parts(place.tp_group, tuple(at for at in others if not is_spread_over(parameters[at], place.tp_group)), experts)
    if place.experts is not None and place.experts.sharding is not None:
        yield Parts(place.experts.sharding.group, (), others)
    along = {} if place.experts is None else place.experts.along
    for dim, group in sorted(along.items(), reverse=True):
        yield Parts(group, tuple(at for at in experts if not is_cut_along(parameters[at], dim)), others)


def _part_of(parameter: torch.Tensor) -> torch.Tensor:
    """A tensor whose `grad` is this rank's part of the parameter's gradient."""
    if parameter.grad is None:
        return parameter
    rows = local_tensor(parameter.grad)
    holder = rows.detach()
    holder.grad = rows
    return holder


@lru_cache(16)
def _order_of_torch(codes: tuple[int, ...], device: torch.device) -> tuple[torch.dtype, torch.Tensor] | None:
    """The dtype of the total norm and the positions in torch's order; None without a gradient."""
    seen = [code for code in dict.fromkeys(codes) if code != _NO_GRADIENT]
    if not seen:
        return None
    dtype = reduce(torch.promote_types, (_DTYPES[code - 1].to_real() for code in seen))
    # torch groups the norms by dtype, and the dtype that appears last comes first.
    return dtype, _places(tuple(place for code in reversed(seen) for place, other in enumerate(codes) if other == code), device)


@lru_cache(16)
def _places(positions: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Positions as a tensor; cached, because a copy to the GPU in each step would make the host wait."""
    return torch.tensor(positions, dtype=torch.int64, device=device)


def share_overflow_(gradients: RankGradients) -> None:
    """If any rank has a non-finite gradient, set the first element of every gradient of every rank to infinity.

    Each rank's own scaler then detects the overflow. Every gradient is changed, because a scaler checks optimizers separately.
    """
    mine = [gradient for gradient in gradients.present() if gradient.numel()]
    device = gradients.place.device
    finite = [norm.isfinite().to(device) for norm in (foreach_norm(mine, math.inf) if mine else [])]
    found = torch.zeros((), dtype=torch.int32, device=device)
    if finite:
        found += ~torch.stack(finite).all()
    gradients.reduce_(found, dist.ReduceOp.MAX)
    for parts in gradients.parts:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=parts.group)
    for gradient in mine:
        first = (0,) * gradient.dim()
        gradient[first] = torch.where(found.to(gradient.device) > 0, math.inf, gradient[first])


def clip_(gradients: RankGradients, max_norm: float, norm: torch.Tensor, foreach: bool | None = None) -> None:
    """Scale this rank's gradients by max_norm / norm if the norm is larger, as torch does."""
    with torch.no_grad():
        torch.nn.utils.clip_grads_with_norm_(gradients.parameters, max_norm, norm, foreach)
