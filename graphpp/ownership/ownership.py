"""Which parameters and buffers each rank of a pipeline owns, and the release of all others.

- The first captured graph decides, for the pipeline's life: a rank owns the tensors that its stages read.
- `release` frees all tensors that only other ranks own; tensors that no stage reads stay.
- `shard_if_asked` keeps this rank's rows of its stages' parameters if the mesh has `dp_shard`, once all have values. Replicas
  must have equal values then (checked in the first training call), or take the first replica's.
- With `Memory(word_parts=)` a rank keeps its rows of the head's weight, once the weight has values.
- With `Memory(release=False)` a rank keeps copies of parameters that other ranks train, stale after each training step. Another
  pipeline of the process that reads a stale copy is refused, until the copy is written (not through `parameter.data`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Protocol

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from graphpp.errors import GraphPPError
from graphpp.options.options import Options
from graphpp.ownership.freed_memory import trim_after
from graphpp.ownership.lent_memory import ShardValues
from graphpp.parallel.agreement import Agreement
from graphpp.parallel.checksum import checksum
from graphpp.parallel.data_parallel import broadcast_
from graphpp.parallel.rank_place import RankPlace, Sharding
from graphpp.runtime.dtensors import any_over_stages, is_expert, is_over_stages, local_tensor, spread_tensor
from graphpp.runtime.fsdp.flat_parameters import FlatParameter
from graphpp.runtime.fsdp.precision import Precision
from graphpp.runtime.fsdp.sharded_parameters import (
    RowsOverStages,
    ShardedParameters,
    SpreadParameters,
    check_shardable,
    check_written,
)
from graphpp.runtime.model_state import ModelState, TensorReader
from graphpp.runtime.parameter_rows import rows_in, whole_name
from graphpp.runtime.program import StageProgram
from graphpp.runtime.released import is_released

_STALE = WeakTensorKeyDictionary()  # copy of a parameter trained elsewhere -> (training rank, version of the copy)


def sharded_elsewhere(fqn: str) -> GraphPPError:
    """The error for a pipeline over a model of which another pipeline has left each rank only rows of a parameter."""
    return GraphPPError(
        f"another pipeline has sharded {fqn} over its ranks, by dp_shard or by memory.word_parts, and sums its gradients: "
        "train and evaluate with that one, or compile this one over a copy of the model"
    )


class Readers(Protocol):
    """The stages of a captured graph, as readers of parameters and buffers."""

    @property
    def ranks_of_parameter(self) -> Mapping[str, Sequence[int]]:
        """The ranks whose stages read each parameter, in order."""

    @property
    def holders(self) -> Mapping[str, Sequence[int]]:
        """The same by the names of the programs, which may mean some rows of a parameter (`parameter_rows.py`)."""

    def parameters(self, rank: int) -> AbstractSet[str]:
        """The parameters that the stages of a rank read."""

    def buffers(self, rank: int) -> AbstractSet[str]:
        """The buffers that the stages of a rank read."""

    def stages_of_parameter(self, rank: int) -> Mapping[str, Sequence[int]]:
        """For each parameter that the stages of a rank read, these stages."""

    def written_buffers(self) -> Iterator[tuple[StageProgram, str]]:
        """(stage, FQN) of each tensor that a forward writes."""


class Ownership:
    """The parameters and buffers of a pipeline's model, by the ranks that own them."""

    def __init__(
        self,
        state: ModelState,
        place: RankPlace,
        options: Options,
        captured: Callable[[], Readers],
        after_exchange: Callable[[], None],
        agreement: Agreement,
    ) -> None:
        """`captured` returns the first graph or raises; `after_exchange` is called after tensors of the model were replaced."""
        self._state, self._place, self._memory, self._parallel = state, place, options.memory, options.parallel
        self._captured, self._after_exchange, self._agreement = captured, after_exchange, agreement
        self.sharded: ShardedParameters | None = None
        self.values_before_sharding: dict[str, int] = {}

    @cached_property
    def local(self) -> frozenset[str]:
        """FQNs of this rank's parameters and buffers. Raises `GraphPPError` before anything is captured."""
        first = self._captured()
        return frozenset(first.parameters(self._place.rank) | first.buffers(self._place.rank))

    @property
    def ranks_of_parameter(self) -> Mapping[str, Sequence[int]]:
        """The ranks that own each parameter, in order. Raises `GraphPPError` before anything is captured."""
        found: Mapping[str, Sequence[int]] = self._captured().ranks_of_parameter
        return found

    @property
    def holders(self) -> Mapping[str, Sequence[int]]:
        """The ranks of each parameter, or of its rows, by the names of the programs. Raises `GraphPPError` as
        `ranks_of_parameter`."""
        found: Mapping[str, Sequence[int]] = self._captured().holders
        return found

    @cached_property
    def experts(self) -> frozenset[str]:
        """FQNs of this rank's tensors that are sharded along `ep`."""
        return frozenset(fqn for fqn in self.local if is_expert(self._state.tensor(fqn), self._place))

    def first_holders(self) -> dict[str, int]:
        """For each parameter and buffer that a stage reads, the first rank that owns it."""
        first, ranks = self._captured(), reversed(range(self._place.ranks))
        return {fqn: rank for rank in ranks for fqn in (*first.parameters(rank), *first.buffers(rank))}

    def release(self) -> int:
        """Free the parameters and buffers that only other ranks own; returns the bytes."""
        given_back = self._state.release({fqn: rank for fqn, rank in self.first_holders().items() if fqn not in self.local})
        self._after_exchange()
        if given_back:
            gc.collect()  # reference cycles may keep the tensors alive
            trim_after(given_back)
        return given_back

    def release_if_asked(self) -> None:
        if self._place.ranks > 1 and self._memory.release:
            self.release()

    def shards_to_fill(self) -> ShardValues | None:
        """Empty shards of this rank's parameters, or its empty parts of parameters that the model shards; None without either.

        Raises `GraphPPError` for a parameter that cannot be sharded.
        """
        sharding, own = self._place.sharding, self._captured().parameters(self._place.rank)
        if sharding is not None:
            return ShardValues(self._shards(sharding), self._source_of_values)
        if self._still_whole:
            return ShardValues(self._made_rows(self._place.device), self._source_of_values)
        named = self._state.named(own, among=self._state.parameters)
        spread = {fqn: tensor for fqn, tensor in named if tensor.is_meta and spread_tensor(tensor) is not None}
        return ShardValues(SpreadParameters(spread, self._place.device), self._source_of_values) if spread else None

    def shard_if_asked(self, filled: ShardValues | None = None) -> None:
        """Shard the parameters of all ranks, if the mesh has shards and all tensors have values. Called by all ranks.

        `filled`: shards, of which some have values; the model has the other values. Raises `GraphPPError`, and changes nothing,
        for a parameter that cannot be sharded.
        """
        sharding = self._place.sharding
        if sharding is None and self._still_whole and filled is None:
            self._cut_rows()
        elif sharding is None and filled is not None:
            filled.sharded.install(self._state)
            self._after_exchange()
        if sharding is None or self.sharded is not None:
            return
        blank = {fqn for fqn in self.local if self._state.tensor(fqn).is_meta}
        known = filled.kept & blank if filled is not None else set[str]()
        if any(self._agreement.largest([bool(blank - known)])):
            return  # until `materialize`, on all ranks
        whole = sorted(self._captured().parameters(self._place.rank) - known)
        sharded = filled.sharded if filled is not None else self._shards(sharding)
        assert isinstance(sharded, ShardedParameters), "on a mesh with shards, values are those of shards"
        self._state.move(whole, self._place.device)
        if self._source_of_values is not None:
            broadcast_([local_tensor(self._state.tensor(fqn)) for fqn in whole], self._source_of_values)
        elif self._parallel.replica_values != "broadcast":
            sums = filled.checksums if filled is not None else {}
            read = {fqn: checksum(local_tensor(self._state.tensor(fqn))) for fqn in self.local - known}
            self.values_before_sharding = read | {fqn: sums[fqn] for fqn in known}
        for fqn in whole:
            sharded.take(fqn, local_tensor(self._state.tensor(fqn)))
        sharded.install(self._state)
        self.sharded = sharded
        self._after_exchange()

    @cached_property
    def _rows_over_stages(self) -> frozenset[str]:
        """FQNs of the parameters whose rows are cut over the ranks of the pipeline."""
        names = self.holders if self._place.ranks > 1 else ()
        return frozenset(whole_name(name) for name in names if rows_in(name) is not None)

    @property
    def _still_whole(self) -> dict[str, torch.Tensor]:
        """Those of them that the model still has whole."""
        in_order = sorted(self._rows_over_stages, key=self._state.positions.__getitem__)
        return {fqn: self._state.tensor(fqn) for fqn in in_order if not is_over_stages(self._state.tensor(fqn))}

    @property
    def is_adapted(self) -> bool:
        """Whether all parameters are sharded that the mesh or `memory.word_parts` shards; equal on all ranks."""
        return not self._still_whole and (self._place.sharding is None or self.sharded is not None)

    def check_shardable(self) -> None:
        """Raise `GraphPPError` if a parameter of this rank cannot be sharded. Changes and exchanges nothing."""
        check_shardable(self._still_whole, "memory.word_parts")
        if self._place.sharding is not None and self.sharded is None:
            own = self._captured().parameters(self._place.rank) - self._still_whole.keys()
            check_shardable(dict(self._state.named(own, among=self._state.parameters)), "dp_shard")

    def check_rows(self) -> None:
        """Raise `GraphPPError` if another pipeline, or the user, has put other objects in the places of parameters."""
        rows = self._rows_over_stages
        for fqn in self._state.parameters if rows or any_over_stages() else ():  # other ranks' too, so that all ranks raise
            tensor = self._state.tensor(fqn)
            if is_over_stages(tensor) and fqn not in rows:
                raise sharded_elsewhere(fqn)
            if fqn in rows and not is_over_stages(tensor) and not tensor.is_meta:
                raise GraphPPError(
                    f"another object stands in the place of {fqn}, whose rows memory.word_parts has cut over the ranks: change "
                    "its values in place, with torch.no_grad(), or by pipe.load_state_dict"
                )

    def _made_rows(self, device: torch.device) -> RowsOverStages:
        return RowsOverStages(self._still_whole, self._place.pipeline_mesh, device)

    def _cut_rows(self) -> None:
        """Put this rank's rows into the model, of parameters with values."""
        if any(self._agreement.largest([any(tensor.is_meta for tensor in self._still_whole.values())])):
            return  # until `materialize`
        rows = self._made_rows(self._place.device)
        for fqn in rows.parameters:
            rows.take(fqn, self._state.tensor(fqn))
        rows.install(self._state)
        self._after_exchange()

    @property
    def _source_of_values(self) -> dist.ProcessGroup | None:
        """The replicas that take the values of the first of them; None: each replica has its own."""
        return self._place.replicas if self._parallel.replica_values == "broadcast" else None

    def _shards(self, sharding: Sharding) -> ShardedParameters:
        first, rank = self._captured(), self._place.rank
        check_written([fqn for _, fqn in first.written_buffers()], first.parameters(rank))
        stages, frees = first.stages_of_parameter(rank), self._parallel.keep is not None
        tensors = dict(self._state.named(stages.keys(), among=self._state.parameters))
        if self._still_whole:
            tensors |= self._made_rows(torch.device("meta")).parameters
        precision = Precision(self._parallel.param_dtype, self._parallel.reduce_dtype)
        of_experts = self._place.experts.sharding if self._place.experts is not None else None
        sharding_of = {fqn: of_experts if of_experts is not None and fqn in self.experts else sharding for fqn in tensors}
        return ShardedParameters(tensors, stages, sharding_of, self._place.device, frees=frees, precision=precision)

    @property
    def flat_parts(self) -> Sequence[FlatParameter]:
        return () if self.sharded is None else self.sharded.flat_parts

    def check_copies(self, graph: Readers) -> None:
        """Raise `GraphPPError` if this rank would read a stale parameter that another pipeline trained on another rank."""
        own = graph.parameters(self._place.rank) if _STALE else ()
        for fqn, tensor in self._state.named(own, among=self._state.parameters):
            rank, version = _STALE.get(tensor, (None, None))
            if version == tensor._version:
                raise GraphPPError(
                    f"rank {rank} of another pipeline of this process has trained the parameter {fqn}, and the copy on this "
                    "rank, which this pipeline reads, has its earlier value. Cut both pipelines so that each parameter is "
                    "on the same rank, or load the trained values on every rank before this call (model.load_state_dict)."
                )

    def after_training(self) -> None:
        """Mark this rank's copies of other ranks' parameters as stale."""
        read, ranks = self._trained_elsewhere
        for tensor, rank in zip(read(), ranks, strict=True):
            if not is_released(tensor) and tensor.requires_grad:
                _STALE[tensor] = rank, tensor._version

    @cached_property
    def _trained_elsewhere(self) -> tuple[TensorReader, Sequence[int]]:
        """A reader of the parameters that only other ranks own, and the first owner of each."""
        rank = self._place.rank
        first = {fqn: ranks[0] for fqn, ranks in self.ranks_of_parameter.items() if ranks and rank not in ranks}
        return self._state.reader(first), list(first.values())
