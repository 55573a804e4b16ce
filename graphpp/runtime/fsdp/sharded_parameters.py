"""The sharded parameters of a rank: `DTensor`s in place of the model's parameters, as views of flat shards.

- Each parameter of a rank's stages is an `nn.Parameter` that is a `DTensor` with the placement `Shard(0)` over the mesh of
  `dp_shard` (`Replicate()` if it is 0-dim). With tensor parallelism the mesh is `tp` x `dp_shard`: `dp_shard` cuts the rows of
  the local `tp` part, and a parameter that `tp` does not cut is replicated over `tp`. The parameter keeps its FQNs, attributes
  and `requires_grad`.
- A parameter whose rows `memory.word_parts` cuts over the ranks of the pipeline (`RowsOverStages`) has the mesh of these ranks;
  with `dp_shard` the mesh is both, and `dp_shard` cuts the rows of a rank's part.
- With expert parallelism an expert's mesh is `ep` x `dp_shard`; all other parameters are sharded over the ranks of both.
- Parameters lie in one flat shard if the same stages of the rank read them, the same ranks share them, they have one dtype and
  one `requires_grad`, and all or none of them are vectors: optimizers often decay matrices alone.
- A parameter with a gradient, with gradient hooks or of a tensor subclass raises `GraphPPError`, and nothing is changed.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from graphpp._torch.autograd import has_gradient_hooks
from graphpp._torch.parallel.sharded_tensor import (
    Spread,
    dtensor_of,
    parameter_of,
    sharded_by_rows,
    spread_of,
    with_local,
)
from graphpp.arguments import type_name
from graphpp.errors import GraphPPError
from graphpp.parallel.rank_place import Sharding
from graphpp.runtime.dtensors import (
    is_over_stages,
    keep_part,
    local_tensor,
    note_over_stages,
    note_sharded,
    slice_of,
    spread_tensor,
)
from graphpp.runtime.fsdp.flat_parameters import FlatParameter, FlatParameters
from graphpp.runtime.fsdp.gather_parameters import FlatShard
from graphpp.runtime.fsdp.precision import Precision
from graphpp.runtime.model_state import ModelState, TensorReader
from graphpp.runtime.parameter_rows import rows_of
from graphpp.runtime.released import forget

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class ShardedParameters:
    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        stages: Mapping[str, Sequence[int]],
        sharding: Mapping[str, Sharding],
        device: torch.device,
        *,
        frees: bool,
        precision: Precision | None = None,
    ) -> None:
        """Make shards of parameters; `take` fills in values, and `install` puts the shards into the model.

        `tensors`: this rank's parameters by FQN, in the model's order, or the parameters of `RowsOverStages`; their values are
        not read. `stages`: the rank's stages
        that read each; `sharding`: the ranks that share each. `frees`: whether whole parameters are freed when their stages are
        resharded. `precision`: the dtypes of whole parameters and of messages.
        """
        check_shardable(tensors, "dp_shard")
        self.sharding, self.precision = sharding, precision or Precision()
        spreads = {fqn: spread_of(tensor) for fqn, tensor in tensors.items() if is_over_stages(tensor)}
        self._over_stages = {fqn: spread for fqn, spread in spreads.items() if spread is not None}
        self._flat_parameters: FlatParameters | None = None
        self._reader: TensorReader | None = None
        groups: dict[Hashable, dict[str, torch.Tensor]] = {}
        for fqn, tensor in tensors.items():
            if tensor.dim():
                same_ranks, vector = id(sharding[fqn]), tensor.dim() == 1
                key = tuple(stages[fqn]), same_ranks, tensor.dtype, tensor.requires_grad, vector
                groups.setdefault(key, {})[fqn] = local_tensor(tensor)
        self.flat = [self._flat_shard(each, device, frees=frees) for each in groups.values()]
        self._flat_of = {fqn: flat for flat in self.flat for fqn in flat.layout.regions}
        scalars = {fqn: tensor for fqn, tensor in tensors.items() if not tensor.dim()}
        self._scalars = {fqn: torch.zeros((), dtype=tensor.dtype, device=device) for fqn, tensor in scalars.items()}
        self.parameters = {fqn: self._parameter(fqn, tensor) for fqn, tensor in tensors.items()}

    @torch.no_grad()
    def take(self, fqn: str, whole: torch.Tensor) -> None:
        """Copy this rank's rows of a parameter, whose values are equal on all ranks of the mesh."""
        over_stages = self._over_stages.get(fqn)
        if fqn in self._scalars:
            self._scalars[fqn].copy_(whole)
        else:
            self._flat_of[fqn].take(fqn, whole if over_stages is None else slice_of(whole, over_stages))

    def install(self, state: ModelState) -> None:
        _install(self.parameters, state, "they are sharded over dp_shard now")

    def check(self, state: ModelState) -> None:
        """Raise `GraphPPError` if the model has another object in place of a sharded parameter."""
        if self._reader is None:
            self._reader = state.reader(self.parameters)
        for (fqn, own), found in zip(self.parameters.items(), self._reader(), strict=True):
            if found is not own:
                raise GraphPPError(
                    f"another object stands in the place of {fqn}, which dp_shard has sharded over the ranks: change its "
                    "values in place, with torch.no_grad(), or by pipe.load_state_dict"
                )

    @property
    def layout(self) -> list[str]:
        """Lines that must be equal on all ranks of the mesh: one for each flat shard, and one about messages."""
        texts = (", ".join(flat.layout.regions) for flat in self.flat)
        lines = [f"{flat.values.dtype} as {flat.whole_dtype} {text}" for flat, text in zip(self.flat, texts, strict=True)]
        return [*lines, f"gradients are sent in {self.precision.reduce_dtype}"]

    def __contains__(self, fqn: str) -> bool:
        return fqn in self.parameters

    def whole(self, fqn: str) -> torch.Tensor:
        """The whole parameter; it has values while a stage that reads it is unsharded. A 0-dim parameter is always current."""
        if fqn in self._scalars:
            own = self._scalars[fqn]
            return own.to(dtype=self.precision.of_whole(own.dtype))
        return self._flat_of[fqn].whole(fqn)

    def gathered_by_programs(self, fqn: str) -> torch.Tensor:
        """The rows, for a program that gathers parameters itself; a 0-dim or empty parameter whole."""
        flat = self._flat_of.get(fqn)
        return self.whole(fqn) if flat is None or not flat.layout.regions[fqn].elements else flat.rows(fqn)

    def shards_of(self, fqns: Iterable[str]) -> list[FlatShard]:
        found = {id(self._flat_of[fqn]) for fqn in fqns if fqn in self._flat_of}
        return [flat for flat in self.flat if id(flat) in found]

    def lengths(self, fqn: str) -> list[int]:
        """The number of a parameter's elements on each rank."""
        return [1] * self.sharding[fqn].ranks if fqn in self._scalars else self._flat_of[fqn].layout.regions[fqn].lengths()

    def flat_parameters(self) -> FlatParameters:
        """The flat parameters, made at the first call; after it, gradients are views of the flat gradients."""
        if self._flat_parameters is None:
            self._flat_parameters = FlatParameters(self.flat, self.parameters)
        return self._flat_parameters

    @property
    def flat_parts(self) -> Sequence[FlatParameter]:
        """The flat parameters, if `flat_parameters` was called."""
        return self._flat_parameters.flat if self._flat_parameters is not None else ()

    def begin_gradients(self) -> None:
        if self._flat_parameters is not None:
            self._flat_parameters.begin()

    def add_gradient(self, fqn: str, rows: torch.Tensor) -> None:
        """Add the gradient of this rank's rows to `parameter.grad`. Takes over `rows`, the elements in order."""
        parameter = self.parameters[fqn]
        if self._flat_parameters is not None and fqn in self._flat_parameters:
            self._flat_parameters.add(fqn, rows)
            return
        if parameter.grad is not None:
            local_tensor(parameter.grad).add_(rows.view_as(local_tensor(parameter.grad)))
            return
        local, wanted = rows.view(local_tensor(parameter).shape), parameter.grad_dtype
        parameter.grad = with_local(parameter, local if wanted is None else local.to(dtype=wanted))

    def _flat_shard(self, tensors: Mapping[str, torch.Tensor], device: torch.device, *, frees: bool) -> FlatShard:
        whole = self.precision.of_whole(next(iter(tensors.values())).dtype)
        group = self.sharding[next(iter(tensors))].group
        return FlatShard(tensors, group, device, frees=frees, whole_dtype=whole)

    def _parameter(self, fqn: str, tensor: torch.Tensor) -> nn.Parameter:
        local = self._scalars[fqn] if fqn in self._scalars else self._flat_of[fqn].local(fqn)
        part = spread_tensor(tensor)
        if fqn in self._over_stages:
            mesh, before = self.sharding[fqn].stage_mesh, self._over_stages[fqn].placements
            made = _made(tensor, local, sharded_by_rows(mesh, tensor.shape, tensor.stride(), before))
            note_over_stages(made)
            return made
        mesh = self.sharding[fqn].spread_mesh
        # A `DTensor` over one rank is whole, as along `ep` of size 1 beside `tp`.
        before = () if part is None or part.spread.mesh.size() == 1 else part.spread.placements
        spread = sharded_by_rows(mesh, tensor.shape, tensor.stride(), before)
        made = _made(tensor, local, spread)
        keep_part(made, tensor)
        note_sharded(made)
        return made


class SpreadParameters:
    """Memory for the model's own `DTensor` parameters, which are on the meta device."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.parameters: dict[str, nn.Parameter] = {}
        for fqn, tensor in tensors.items():
            part = spread_tensor(tensor)
            assert part is not None, f"{fqn} is spread"
            local = torch.empty_strided(part.local.shape, part.local.stride(), dtype=tensor.dtype, device=device)
            self.parameters[fqn] = _made(tensor, local, part.spread)

    def __contains__(self, fqn: str) -> bool:
        return fqn in self.parameters

    @torch.no_grad()
    def take(self, fqn: str, part: torch.Tensor) -> None:
        local_tensor(self.parameters[fqn]).copy_(part)

    def install(self, state: ModelState) -> None:
        _install(self.parameters, state, "pipe.materialize has put others in their places")


class RowsOverStages:
    """Rank r's part of parameters whose rows are cut over the ranks of a pipeline (`parameter_rows.py`), as `DTensor`s."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], mesh: DeviceMesh, device: torch.device) -> None:
        """`tensors`: the whole parameters by FQN, whose values are not read; `mesh`: the ranks of the pipeline."""
        check_shardable(tensors, "memory.word_parts")
        self.parameters: dict[str, nn.Parameter] = {}
        for fqn, tensor in tensors.items():
            rows = rows_of(tensor.shape[0], mesh.size(), mesh.get_local_rank())
            local = torch.empty((len(rows), *tensor.shape[1:]), dtype=tensor.dtype, device=device)
            self.parameters[fqn] = _made(tensor, local, sharded_by_rows(mesh, tensor.shape, tensor.stride()))
            note_over_stages(self.parameters[fqn])

    def __contains__(self, fqn: str) -> bool:
        return fqn in self.parameters

    @torch.no_grad()
    def take(self, fqn: str, whole: torch.Tensor) -> None:
        """Copy this rank's rows of a parameter."""
        spread = spread_of(self.parameters[fqn])
        assert spread is not None, "it was made with placements"
        local_tensor(self.parameters[fqn]).copy_(slice_of(whole, spread))

    def install(self, state: ModelState) -> None:
        _install(self.parameters, state, "memory.word_parts has cut their rows over the ranks of the pipeline")


def _made(tensor: torch.Tensor, local: torch.Tensor, spread: Spread) -> nn.Parameter:
    """A `DTensor` parameter with the attributes and `requires_grad` of `tensor`."""
    made = parameter_of(dtensor_of(local, spread), requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    if tensor.requires_grad:
        made.grad_dtype = tensor.grad_dtype
    return made


def _install(parameters: Mapping[str, nn.Parameter], state: ModelState, now: str) -> None:
    """Put parameters into the model; `now` says where the former ones are trained."""
    former = {fqn: state.tensor(fqn) for fqn in parameters}
    state.exchange({id(tensor): parameters[fqn] for fqn, tensor in former.items()})
    forget(((tensor, fqn) for fqn, tensor in former.items()), now)


def check_shardable(tensors: Mapping[str, torch.Tensor], option: str) -> None:
    """Raise `GraphPPError` for a parameter of which no rank can have rows. `option`: asks for the rows."""
    for fqn, tensor in tensors.items():
        plain = type(tensor).__torch_function__ is nn.Parameter.__torch_function__
        if not plain and not is_over_stages(tensor) and spread_tensor(tensor) is None:
            raise GraphPPError(f"{fqn} is a {type_name(tensor)}, and {option} takes plain parameters")
        if tensor.grad is not None:
            raise GraphPPError(
                f"{fqn} has a gradient, and a new parameter with this rank's rows takes its place: call zero_grad() before "
                "graphpp.compile"
            )
        if has_gradient_hooks(tensor):
            raise GraphPPError(
                f"{fqn} has a gradient hook, and a new parameter with this rank's rows takes its place: register hooks on "
                "pipe.parameters()"
            )


def check_written(written: Collection[str], sharded: Collection[str]) -> None:
    found = sorted(set(written) & set(sharded))
    if found:
        raise GraphPPError(f"the forward writes the parameter {found[0]}, of which dp_shard keeps rows only: make it a buffer")
