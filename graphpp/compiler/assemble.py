"""Make the runner of a lowered call that all ranks agreed on. All ranks call `compile`, then `runner`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphpp.backends.choose_backend import compiler_of
from graphpp.backends.record_programs import RecordedPrograms, recorder_for
from graphpp.compiler.build import Lowered
from graphpp.compiler.compile_graph import CompiledGraph
from graphpp.compiler.compile_regions import RegionCache
from graphpp.compiler.request import CompileRequest
from graphpp.parallel import backend_sums, ordered_sums
from graphpp.parallel.agreement import agree_on_collectives
from graphpp.parallel.data_parallel import check_apart
from graphpp.runtime.fsdp.sharded_parameters import ShardedParameters
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.offloader import mover_for
from graphpp.runtime.runner import GraphPPRunner, RunnerConfig

Owners = Mapping[str, Sequence[int]]


class Assembly:
    """Makes runners, and keeps their compiled regions and CUDA graphs."""

    def __init__(self, request: CompileRequest, state: ModelState) -> None:
        self._options, self._place, self._state = request.options, request.place, state
        self._compiler = compiler_of(self._options.backend)
        self.regions = RegionCache(self._compiler, self._place.rank) if self._compiler is not None else None
        self.recorded = RecordedPrograms(recorder_for(self._place.device) if self._options.backend.cudagraphs else None)

    def keep_only(self, graphs: Iterable[CompiledGraph]) -> None:
        """Forget the regions of other graphs."""
        if self.regions is not None:
            self.regions.keep_only(graphs)

    def compile(self, lowered: Lowered, *, averages: bool = True) -> None:
        """Compare the collectives of each of the model's process groups, then compile the regions of a call.

        `averages`: whether gradients are averaged over the replicas. Raises `MismatchError` if the ranks' collectives differ,
        `GraphPPError` if the model exchanges values with ranks that average its gradients.
        """
        agree_on_collectives(lowered.collectives, self._place.agreement)
        if averages and self._place.replicas is not None:
            check_apart(lowered.groups_of_model, self._place)
        if self.regions is not None:
            self.regions.compile(lowered.region_calls)

    def runner(
        self,
        lowered: Lowered,
        owners: Owners,
        sharded: ShardedParameters | None = None,
        *,
        averages: bool = True,
    ) -> GraphPPRunner:
        """The runner of a compiled call; `owners`: the ranks of each parameter; `sharded`: this rank's shards."""
        asked = self._options.backend.cudagraphs
        config = RunnerConfig(
            owners=owners,
            sum_dtype=self._options.gradients.dtype,
            replicas=self._place.replicas if averages else None,
            experts=self._place.experts if averages else None,
            kernel=self._compiler.products if self._compiler is not None else None,
            woven=lowered.woven,
            offload=lowered.windows,
            mover=mover_for(self._place.device),
            sharded=sharded,
            graphs=self.recorded.of_step(lowered.programs, lowered.local, lowered.sources) if asked else None,
            sums=ordered_sums if self._options.parallel.sum_order == "ranks" else backend_sums,
            slow_after=self._options.parallel.slow_after,
        )
        return GraphPPRunner(lowered.programs, lowered.schedule, self._state, self._place, config)
