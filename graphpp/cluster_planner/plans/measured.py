"""Plan a pipeline whose stages were measured: the schedule and `keep` with the fastest step within a memory cap.

Tries each named schedule that admits the numbers, and `megatron_interleaved` for each group; with shards, each without `keep`
and with 1 up to the stages per rank. A plan decides only the schedule, the microbatches and `keep`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf

from graphpp.cluster_planner.plans.found_plans import TrainingPlans, ranked
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.prediction.lower_bound import least_seconds
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction
from graphpp.cluster_planner.plans.prediction.read_tables import read_table
from graphpp.cluster_planner.plans.settings import PlanSetting, ScheduleChoice, table_of
from graphpp.cluster_planner.plans.training_plan import StepSeconds
from graphpp.errors import ScheduleError
from graphpp.schedules.check.shard_counts import shard_counts
from graphpp.schedules.check.step_memory import step_peaks
from graphpp.schedules.generate.megatron_interleaved import legal_groups
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import BACKWARDS, Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import StateBytes, held_bytes, sent_by_stage


@dataclass(frozen=True)
class MeasuredPipeline:
    """Measured costs and state. `bandwidth`: bytes per second of a rank along `dp_shard`; None: `costs` has the seconds."""

    costs: Costs
    state: Sequence[StateBytes]
    shape: MeshShape
    rows: int
    microbatches: int
    bandwidth: float | None = None

    @property
    def timed(self) -> Costs:
        """The costs with the times of gathers and reductions."""
        if self.bandwidth is None:
            return self.costs
        sent = sent_by_stage(self.state, len(self.costs.stages), self.shape.dp_shard)
        gathers, reductions = (tuple(nbytes / self.bandwidth for nbytes in each) for each in sent)
        return replace(self.costs, gathers=gathers, reductions=reductions)


def measured_plans(
    found: MeasuredPipeline, cap: int | Sequence[int] | None, schedules: Collection[str] | None = None
) -> TrainingPlans:
    """The plans. `cap`: of all ranks, or one for each. Raises `NoPlanError` if none fits the cap, `ScheduleError` if no
    schedule admits the numbers."""
    stages, ranks = len(found.costs.stages), found.shape.pp
    caps = tuple(cap) if isinstance(cap, Sequence) else ()
    if len(caps) not in (0, ranks):
        raise ScheduleError(f"memory_cap: take one number of bytes, or one for each of {ranks} pipeline ranks, got {len(caps)}")
    wrong = next((stage for each in found.state for stage in each.readers if not 0 <= stage < stages), None)
    if wrong is not None:
        raise ScheduleError(f"state: there is no stage {wrong}, the costs are of {stages} stages: give both of one split")
    sharded = found.shape.dp_shard > 1
    steps = [
        _prediction(found, choice, table.schedule, keep)
        for choice in _choices(found, schedules)
        for keep in (None, *(range(1, choice.stages_per_rank + 1) if sharded else ()))
        if (table := read_table(choice, ranks, found.microbatches, keep, sharded)) is not None
    ]
    if not steps:
        numbers = f"{stages} stages on {ranks} ranks and {found.microbatches} microbatches"
        raise ScheduleError(f"no schedule takes {numbers}: give a multiple of the ranks for both")
    rows = found.rows * found.microbatches * found.shape.dp_shard
    facts = {
        "machines": "measured", "split": (), "batch": rows, "tokens": 0, "mfu": 0.0, "dtype": None, "costs": found.timed,
        "bound": least_seconds(found.timed, ranks, found.microbatches),
    }  # fmt: skip
    most = max(cap) if isinstance(cap, Sequence) else inf if cap is None else cap
    return ranked([replace(each, caps=caps) for each in steps], most, len(steps), lambda each: facts)


def _choices(found: MeasuredPipeline, schedules: Collection[str] | None) -> Iterator[ScheduleChoice]:
    """The training schedules that admit these numbers, without equal tables; "auto" last, which may equal a named one."""
    ranks, seen = found.shape.pp, set[object]()
    per_rank, rest = divmod(len(found.costs.stages), ranks)
    names = [*(name for name in SCHEDULES if name != "auto"), "auto"] if not rest else []
    choices = [ScheduleChoice(name, per_rank) for name in names]
    if per_rank > 1 and not rest:
        groups = legal_groups(ranks, found.microbatches)
        choices += [ScheduleChoice("MegatronInterleaved", per_rank, group) for group in groups]
    for choice in choices:
        asked = schedules is None or choice.name in schedules
        table = table_of(choice, ranks, found.microbatches) if asked else None
        if table is not None and not table.kinds.isdisjoint(BACKWARDS):
            actions = tuple(tuple(filter(None, row)) for row in table.table)
            if actions not in seen:
                seen.add(actions)
                yield choice


def _prediction(found: MeasuredPipeline, choice: ScheduleChoice, running: Schedule, keep: int | None) -> Prediction:
    costs, shape = found.timed, found.shape
    shards = shape.dp_shard if shape.dp_shard > 1 else None
    if not costs.blocking:  # blocking receives keep their place
        running = hoist_receives(running, costs.flow.ahead)
    peaks = step_peaks(running, costs, held_bytes(found.state, running.rank_of_stage, shape.pp, shards, keep is not None))
    timeline, counts = simulate(running, costs), shard_counts(running)
    along = sent_by_stage(found.state, len(costs.stages), shape.dp_shard)
    busiest = max(range(shape.pp), key=timeline.busy)
    busy = timeline.busy(busiest)
    own = [costs.stages[stage] for stage, rank in running.rank_of_stage.items() if rank == busiest]
    forward, backward = (sum(part.of(kind) for part in own) for kind in (Kind.F, Kind.B))
    forwards = busy * forward / (forward + backward) if forward + backward else 0.0
    return Prediction(
        setting=PlanSetting(shape, found.rows, found.microbatches, choice, keep),
        cut=(),
        seconds=StepSeconds(forwards, busy - forwards, bubble=max(0.0, timeline.makespan - busy)),
        peaks=tuple(each.nbytes for each in peaks),
        memory=max(peaks, key=lambda each: each.nbytes).most,
        sent={"dp_shard": round(max(each.sent(*along) for each in counts)) if shards else 0},
    )
