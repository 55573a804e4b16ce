"""From captured graphs to the runner of a call.

Contract
    in   the graph of each microbatch, the schedule, who holds which parameter
    out  a `GraphPPRunner`: the programs of each microbatch, those of this rank's stages under the backend, woven where the
         schedule overlaps them and in CUDA graphs where asked for; with sums, products and offloading as the settings say
    Called by all ranks; if a step of it fails on one rank it fails on all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from graphpp.backends.compilers import compiler_of
from graphpp.backends.record_programs import RecordedPrograms, recorder_for
from graphpp.compiler.buffer_hazards import check_late_reads
from graphpp.compiler.build import Built, Compiler
from graphpp.compiler.compile_regions import CompiledPrograms
from graphpp.parallel.agreement import Agreement, Facts, agree_on_collectives
from graphpp.parallel.data_parallel import check_apart
from graphpp.parallel.groups import Subgroups
from graphpp.passes.provenance import ProgramGraphs
from graphpp.runtime.model_state import ModelState
from graphpp.runtime.offloader import mover_for
from graphpp.runtime.program import Phase, PipelineProgram, WovenProgram
from graphpp.runtime.runner import GraphPPRunner, RunnerConfig
from graphpp.schedules.table.schedule import Schedule

Owners = Mapping[str, Sequence[int]]


class Assembly:
    """Makes runners, and keeps what they share: groups of ranks, compiled regions, CUDA graphs."""

    def __init__(self, compiler: Compiler, state: ModelState, agreement: Agreement) -> None:
        self._compiler, self._state, self._agreement = compiler, state, agreement
        self._options, self._place = compiler.options, compiler.place
        self._region_compiler = compiler_of(self._options.backend)
        self._subgroups = Subgroups(self._place.group)
        self._programs = (
            CompiledPrograms(self._region_compiler, self._place.rank) if self._region_compiler is not None else None
        )
        self.graphs = RecordedPrograms(recorder_for(self._place.device) if self._options.backend.cudagraphs else None)

    def keep_only(self, built: Sequence[Built]) -> None:
        """Forget what was compiled for other graphs."""
        if self._programs is not None:
            self._programs.keep_only(built)

    def runner(
        self, built: Sequence[Built], schedule: Schedule, replicas: dist.ProcessGroup | None, owners: Owners
    ) -> GraphPPRunner:
        """The runner of a call whose microbatches use these graphs; `owners` are the ranks of each parameter."""
        programs = self._agreement.together(lambda: self._cut(built, schedule), lambda _: Facts({}))
        programs = self._agreement.together(lambda: self._compiled(built, programs, schedule), lambda _: Facts({}))
        woven = self._agreement.together(lambda: self._woven(built, programs, schedule), lambda _: Facts({}))
        local = [stage for stage, rank in schedule.rank_of_stage.items() if rank == self._place.rank]
        if self._options.backend.cudagraphs:
            sources = ProgramGraphs.joined(each.sources for each in built)
            programs, woven = self.graphs.record_all(programs, woven, local, sources)
        training = Phase.FORWARD in programs[0].stages[0].programs
        config = RunnerConfig(
            owners=owners,
            subgroups=self._subgroups,
            sum_dtype=self._options.gradients.dtype,
            replicas=replicas,
            kernel=self._region_compiler.products if self._region_compiler is not None else None,
            woven=woven,
            offload=self._compiler.offload_windows(built, schedule) if training else (),
            mover=mover_for(self._place.device),
        )
        return GraphPPRunner(programs, schedule, self._state, self._place, config)

    def _cut(self, built: Sequence[Built], schedule: Schedule) -> list[PipelineProgram]:
        """The programs of each microbatch."""
        programs = [self._compiler.program(each, schedule, index) for index, each in enumerate(built)]
        check_late_reads(programs)
        return programs

    def _compiled(
        self, built: Sequence[Built], programs: Sequence[PipelineProgram], schedule: Schedule
    ) -> list[PipelineProgram]:
        """The programs, those of this rank's stages under the backend."""
        if self._programs is None:
            return list(programs)
        rank = self._place.rank
        local = [stage for stage, home in schedule.rank_of_stage.items() if home == rank]
        return self._programs.compile(list(zip(built, programs, strict=True)), local)

    def _woven(
        self, built: Sequence[Built], programs: Sequence[PipelineProgram], schedule: Schedule
    ) -> list[WovenProgram]:
        """This rank's woven programs. Raises `MismatchError` where another rank of a model's group would not run alike."""
        woven, collectives = self._compiler.overlaps(built, programs, schedule)
        agree_on_collectives(collectives, self._place.device)
        check_apart(collectives, self._place.replicas)
        return woven
