"""The gradients of parameters that are gathered one layer at a time: those of a layer are summed over the ranks at once.

Contract
--------
- A program hands its gradients to a `LayerSink`. When the sink has all gradients of a layer of one microbatch, the sums over
  the ranks start, and the whole gradients are given back when they have left. At most one layer's messages are under way.
- Each rank adds its rows to its stage's sums in the order of the microbatches. A gradient is (m0 + m1 + ..) / replicas with
  m0 = r0 + r1 + .. over the ranks of the mesh, then the sum over their copies: other bits than where the microbatches are added
  first, but the same bits under every schedule.
- `finish` adds up tied parameters and copies as `ShardedGradients` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from graphpp.parallel.sums import PendingSums, Sums
from graphpp.runtime.gradients.accumulate import Accumulator, dtype_of_sum
from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout, TorchMatmul, gradient_of
from graphpp.runtime.gradients.tied import TiedReduction
from graphpp.runtime.shards.sharded_gradients import ShardedGradients, scattered
from graphpp.runtime.shards.sharded_parameters import ShardedParameters


class LayerReducer:
    """Sums the gradients of single layers over the ranks, and adds this rank's rows to the sums of a stage."""

    def __init__(self, sharded: ShardedParameters, sum_dtype: torch.dtype | None, over_ranks: Sums) -> None:
        """`sum_dtype`: the dtype in which gradients of narrower parameters add up; `over_ranks`: adds over ranks."""
        self._sharded, self._sum_dtype, self.over_ranks = sharded, sum_dtype, over_ranks
        self._pending: deque[tuple[LayerSink, list[str], PendingSums]] = deque()
        self._waiting: dict[tuple[LayerSink, int], dict[str, torch.Tensor]] = {}

    def dtype_of_rows(self, fqn: str) -> torch.dtype:
        """The dtype in which the rows of a parameter's gradient add up."""
        return dtype_of_sum(self._sharded.parameters[fqn], self._sum_dtype)

    def collect(self, sink: LayerSink, layer: int, fqn: str, gradient: torch.Tensor) -> None:
        """Keep a gradient until the layer's others are there, then start to sum them all."""
        waiting = self._waiting.setdefault((sink, layer), {})
        waiting[fqn] = gradient
        if len(waiting) == len(sink.layers[layer]):
            del self._waiting[sink, layer]
            self.finish()  # the memory of messages goes back before more is taken
            totals = {each: waiting.pop(each) for each in sink.layers[layer]}
            sharding = self._sharded.sharding[fqn]  # the same ranks share all of them
            started = scattered(totals, list(totals), self._sharded, sharding, self.over_ranks, self.dtype_of_rows)
            self._pending.extend((sink, fqns, pending) for fqns, pending in started)

    def finish(self) -> None:
        """Add the rows of all sums that have started."""
        while self._pending:
            sink, fqns, pending = self._pending.popleft()
            for fqn, rows in zip(fqns, pending(), strict=True):
                sink.sums.add(sink.microbatch, fqn, rows)

    def check_whole(self) -> None:
        """Raise `RuntimeError` if a layer of a microbatch lacks a gradient, so that its others were never summed."""
        for (sink, layer), waiting in self._waiting.items():
            lacking = [fqn for fqn in sink.layers[layer] if fqn not in waiting]
            raise RuntimeError(
                f"microbatch {sink.microbatch}: the gradients of {', '.join(waiting)} wait for those of {', '.join(lacking)}, "
                "which the backward of the stage has not made. This is a fault of graphpp: please report it with the model."
            )

    def drop(self) -> None:
        """Drop the gradients of a step that failed."""
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
        """Take a gradient."""
        fqn = self._fqns[index]
        self._reducer.collect(self, self._layer_of[fqn], fqn, value)

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        """Take the gradient `a @ b`."""
        self(index, gradient_of(TorchMatmul(), a, b, layout))


class LayerGradients(ShardedGradients):
    """The gradients of one rank's stages, where programs gather and reduce single layers."""

    def __init__(
        self,
        stages: Mapping[int, Accumulator],
        tied: TiedReduction,
        sharded: ShardedParameters,
        replicas: int,
        sum_dtype: torch.dtype | None,
        reducer: LayerReducer,
    ) -> None:
        """`stages`: the sums of each local stage, of this rank's rows; `replicas`: by how many the sums are divided."""
        super().__init__(stages, tied, sharded, replicas, sum_dtype, reducer.over_ranks)
        self._reducer = reducer

    def begin(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin a step. `parameters`: those of the rank's stages, by FQN."""
        self._sharded.begin_gradients()
        for sums in self._stages.values():
            sums.start({}, {fqn: self._reducer.dtype_of_rows(fqn) for fqn in sums.fqns})

    def reduce(self, stage: int) -> None:
        """Do nothing: all gradients of the stage by now are on their way."""

    def finish(self) -> None:
        """Add the gradients of this rank's rows to `param.grad`. Raises `RuntimeError` if a layer lacks a gradient."""
        self._reducer.finish()
        self._reducer.check_whole()
        self._rows = {(stage, fqn): rows for stage, sums in self._stages.items() for fqn, rows in sums.take().items()}
        super().finish()

    def drop(self) -> None:
        """Drop the gradients of a step that failed."""
        self._reducer.drop()
        super().drop()
