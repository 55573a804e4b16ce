"""The gradients of sharded parameters: averaged over all replicas, then each rank keeps the gradients of its rows.

- `reduce(stage)` takes over the stage's sums of whole gradients and starts their reduce-scatter over the mesh. A whole sum is
  freed when its rows have left. A stage may be reduced several times in a step. At most one reduce-scatter is in flight: the
  next one waits for it. If it was the stage's REDUCE_GRAD after its last backward (`whole`), the sums over the copies of its
  rows start then, and run beside the computations of other stages; others, and those of tied parameters, start in `finish`.
- `finish` adds up the partial sums of tied parameters and adds everything to `param.grad`, a `DTensor` like its parameter.
- A gradient is ((r0 + r1) + ..) / replicas, over the ranks of the mesh, then over their copies, in the order that `Sums`
  defines. The sums of several reductions are added in their order.
- Whole sums have the dtype of whole parameters, or the wider `sum_dtype`; `Precision` gives the dtype of messages. Rows have
  the dtype of the rank's parameters, or the wider one.
- All ranks of the mesh reduce the same stages in the same order, and the gradients of a stage by FQN. All ranks of a pipeline
  call `finish` once per training step.
- Programs that gather one layer at a time give their gradients to a `LayerSink`. Once a layer's gradients of one microbatch are
  complete, their sums start. Each rank adds its rows to the stage's sums in microbatch order: ((m0 + m1) + ..) / replicas with
  m0 = r0 + r1 + .., then over the copies. These bits differ from those of whole
  sums, but are equal under every schedule.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from graphpp.parallel.rank_place import Sharding
from graphpp.parallel.sums import PendingSums, Sums, bundles, merged
from graphpp.runtime.fsdp.sharded_parameters import ShardedParameters
from graphpp.runtime.gradients.accumulate import Accumulator, dtype_of_sum
from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout, deferred_matmul
from graphpp.runtime.gradients.tied import PartialSums, TiedReduction

_Key = tuple[int, str]  # a stage and the FQN of a parameter


def scattered(
    totals: dict[str, torch.Tensor],
    names: Sequence[str],
    sharded: ShardedParameters,
    sharding: Sharding,
    over_ranks: Sums,
    dtype_of_rows: Callable[[str], torch.dtype],
) -> Iterator[tuple[list[str], PendingSums]]:
    """Start to sum whole gradients over the ranks of `sharding`, bundle by bundle: their FQNs, and this rank's pending rows.

    Takes the tensors of `names` out of `totals`, so that each one is freed once its elements are packed.
    """
    for fqn in names:
        whole = totals[fqn] if totals[fqn].dim() else totals[fqn].repeat(sharding.ranks)  # every rank needs a 0-dim one
        totals[fqn] = whole.to(dtype=sharded.precision.of_messages(whole.dtype)).contiguous()
    for fqns in ([names[at] for at in bundle] for bundle in bundles([totals[name] for name in names])):
        lengths, dtypes = [sharded.lengths(fqn) for fqn in fqns], [dtype_of_rows(fqn) for fqn in fqns]
        yield fqns, over_ranks.scattered([totals.pop(fqn) for fqn in fqns], lengths, sharding.group, dtypes)


class ShardedGradients:
    """The gradients of one rank's stages, where the rank has shards of parameters."""

    def __init__(
        self,
        stages: Mapping[int, Accumulator],
        tied: TiedReduction,
        sharded: ShardedParameters,
        replicas: int,
        sum_dtype: torch.dtype | None,
        over_ranks: Sums,
        partial: PartialSums,
    ) -> None:
        """`stages`: the sums of each local stage; `replicas`: the divisor of the sums; `over_ranks` adds over ranks."""
        self._stages, self._tied, self._sharded, self._replicas = stages, tied, sharded, replicas
        self._sum_dtype, self._over_ranks, self._partial = sum_dtype, over_ranks, partial
        self._pending: deque[tuple[int, list[str], PendingSums, bool]] = deque()  # by stage; whether nothing is added later
        self._rows: dict[_Key, torch.Tensor] = {}
        self._copied: deque[tuple[torch.Tensor, PendingSums]] = deque()  # sums over copies
        self._summed = set[str]()  # FQNs of rows whose sums over copies have started

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._sharded.begin_gradients()
        precision = self._sharded.precision
        for sums in self._stages.values():
            sums.start({}, {fqn: precision.of_sums(parameters[fqn], self._sum_dtype) for fqn in sums.fqns})

    def reduce(self, stage: int, whole: bool = False) -> None:
        self._add_started()  # frees their memory before more is allocated
        taken = self._stages[stage].take()
        self._partial.add_up(taken)
        for sharding, names in self._by_sharding(taken):
            started = scattered(taken, names, self._sharded, sharding, self._over_ranks, self._dtype_of_rows)
            self._pending.extend((stage, fqns, pending, whole) for fqns, pending in started)

    def finish(self) -> None:
        for stage in self._stages:
            self.reduce(stage, whole=True)
        self._add_started()
        rows, self._rows = self._rows, {}
        totals = self._tied.reduce(lambda stage, fqn: rows.pop((stage, fqn)), self._buffer_for_sum)
        totals |= {fqn: total for (_, fqn), total in rows.items()}
        rows.clear()
        self._start_over_copies(totals, [fqn for fqn in totals if fqn not in self._summed])
        while self._copied:
            flat, pending = self._copied.popleft()
            flat.copy_(pending()[0])
        for fqn, total in totals.items():
            self._sharded.add_gradient(fqn, total.div_(self._replicas))
        self._end()

    def drop(self) -> None:
        self._pending.clear()
        self._rows.clear()
        self._copied.clear()
        self._end()

    def _end(self) -> None:
        self._summed.clear()
        for sums in self._stages.values():
            sums.start({})

    def _start_over_copies(self, totals: MutableMapping[str, torch.Tensor], fqns: Iterable[str]) -> None:
        """Start to add up over the replicas that have the same rows. The totals become views of the memory that is summed."""
        for sharding, names in self._by_sharding(fqns):
            if sharding.copies is not None:
                flats = merged(totals, names)
                self._copied.extend((flat, self._over_ranks.everywhere(flat, sharding.copies)) for flat in flats)
            self._summed.update(names)

    def _by_sharding(self, fqns: Iterable[str]) -> list[tuple[Sharding, list[str]]]:
        """Parameters by the ranks that share them, sorted by FQN: replicas may make gradients in another order."""
        found: dict[int, tuple[Sharding, list[str]]] = {}
        for fqn in sorted(fqns):
            sharding = self._sharded.sharding[fqn]
            found.setdefault(id(sharding), (sharding, []))[1].append(fqn)
        return list(found.values())

    def _buffer_for_sum(self, fqn: str) -> torch.Tensor:
        elements = self._sharded.lengths(fqn)[self._sharded.sharding[fqn].rank]
        return torch.empty(elements, dtype=self._dtype_of_rows(fqn), device=self._sharded.parameters[fqn].device)

    def _dtype_of_rows(self, fqn: str) -> torch.dtype:
        return dtype_of_sum(self._sharded.parameters[fqn], self._sum_dtype)

    def _add_started(self) -> None:
        while self._pending:
            stage, fqns, pending, whole = self._pending.popleft()
            for fqn, rows in zip(fqns, pending(), strict=True):
                before = self._rows.get((stage, fqn))
                self._rows[stage, fqn] = rows if before is None else before.add_(rows)
            own = {fqn: self._rows[stage, fqn] for fqn in fqns if fqn not in self._tied.contributors} if whole else {}
            self._start_over_copies(own, own)
            self._rows.update(((stage, fqn), rows) for fqn, rows in own.items())


class LayerReducer:
    """Sums the gradients of single layers over the ranks, and adds this rank's rows to the sums of a stage."""

    def __init__(self, sharded: ShardedParameters, sum_dtype: torch.dtype | None, over_ranks: Sums) -> None:
        self._sharded, self._sum_dtype, self._over_ranks = sharded, sum_dtype, over_ranks
        self._pending: deque[tuple[LayerSink, list[str], PendingSums]] = deque()
        self._waiting: dict[tuple[LayerSink, int], dict[str, torch.Tensor]] = {}

    def _dtype_of_rows(self, fqn: str) -> torch.dtype:
        return dtype_of_sum(self._sharded.parameters[fqn], self._sum_dtype)

    def collect(self, sink: LayerSink, layer: int, fqn: str, gradient: torch.Tensor) -> None:
        """Keep a gradient until all gradients of its layer have arrived, then start to sum them."""
        waiting = self._waiting.setdefault((sink, layer), {})
        waiting[fqn] = gradient
        if len(waiting) == len(sink.layers[layer]):
            del self._waiting[sink, layer]
            self.finish()  # frees the memory of messages before more is allocated
            totals = {each: waiting.pop(each) for each in sink.layers[layer]}
            sharding = self._sharded.sharding[fqn]  # the same ranks share all of them
            started = scattered(totals, list(totals), self._sharded, sharding, self._over_ranks, self._dtype_of_rows)
            self._pending.extend((sink, fqns, pending) for fqns, pending in started)

    def finish(self) -> None:
        """Add the rows of all sums that have started."""
        while self._pending:
            sink, fqns, pending = self._pending.popleft()
            for fqn, rows in zip(fqns, pending(), strict=True):
                sink.sums.add(sink.microbatch, fqn, rows)

    def check_whole(self) -> None:
        """Raise `RuntimeError` if a layer of a microbatch lacks a gradient, so that its other gradients were never summed."""
        for (sink, layer), waiting in self._waiting.items():
            lacking = [fqn for fqn in sink.layers[layer] if fqn not in waiting]
            raise RuntimeError(
                f"microbatch {sink.microbatch}: the gradients of {', '.join(waiting)} wait for those of {', '.join(lacking)}, "
                "which the backward of the stage has not made. This is a fault of graphpp: please report it with the model."
            )

    def drop(self) -> None:
        self._pending.clear()
        self._waiting.clear()


class LayerSink:
    """The `GradientSink` of one program run whose gradients are summed over the ranks layer by layer."""

    def __init__(
        self,
        reducer: LayerReducer,
        sums: Accumulator,
        microbatch: int,
        fqns: Mapping[int, str],
        layers: Sequence[Sequence[str]],
    ) -> None:
        """`sums`: of this rank's rows of the stage's gradients; `fqns`: the parameter of each gradient by index."""
        self._reducer, self.sums, self.microbatch, self._fqns, self.layers = reducer, sums, microbatch, fqns, layers
        self._layer_of = {fqn: number for number, layer in enumerate(layers) for fqn in layer}

    def __call__(self, index: int, value: torch.Tensor) -> None:
        fqn = self._fqns[index]
        value = torch.zeros_like(value) if self.microbatch in self.sums.silent else value
        self._reducer.collect(self, self._layer_of[fqn], fqn, value)

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        self(index, deferred_matmul(a, b, layout))


class LayerGradients(ShardedGradients):
    """The gradients of one rank's stages, where programs gather and reduce single layers by `reducer`."""

    def __init__(self, reducer: LayerReducer, *parts: Any) -> None:
        super().__init__(*parts)
        self._reducer = reducer

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._sharded.begin_gradients()
        for sums in self._stages.values():
            sums.start({}, {fqn: self._dtype_of_rows(fqn) for fqn in sums.fqns})

    def reduce(self, stage: int, whole: bool = False) -> None:
        """Do nothing: the sink starts the sums during the backward."""

    def finish(self) -> None:
        """As in the base class. Raises `RuntimeError` if a layer lacks a gradient."""
        self._reducer.finish()
        self._reducer.check_whole()
        self._rows = {(stage, fqn): rows for stage, sums in self._stages.items() for fqn, rows in sums.take().items()}
        super().finish()

    def drop(self) -> None:
        self._reducer.drop()
        super().drop()
