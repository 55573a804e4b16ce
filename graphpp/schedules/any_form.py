"""`check` and `simulate` for every form of a schedule that `graphpp.compile` takes: a name, a file, rows, a function."""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.arguments import COUNT, FLAG, checked, or_none
from graphpp.errors import ScheduleError
from graphpp.schedules.check import checker
from graphpp.schedules.check.step_memory import EACH_COSTS, WINDOWS, MicrobatchCosts
from graphpp.schedules.generate.read import ScheduleLike, default_stages, load_schedule, make_table
from graphpp.schedules.simulate import simulator
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule


@checked(
    ScheduleError,
    ranks=COUNT,
    stages=COUNT,
    microbatches=COUNT,
    training=FLAG,
    costs=or_none(EACH_COSTS),
    offloaded=WINDOWS,
)
def check(
    schedule: ScheduleLike,
    *,
    ranks: int,
    stages: int,
    microbatches: int,
    training: bool = True,
    costs: MicrobatchCosts | None = None,
    memory_cap: int | Sequence[int] | None = None,
    offloaded: Sequence[OffloadWindow] = (),
) -> None:
    """Accept a schedule, with or without communication, or raise `ScheduleError`; arguments as in `checker.check`."""
    table = make_table(schedule, ranks, stages, microbatches)
    checker.check(
        table,
        ranks=ranks,
        stages=stages,
        microbatches=microbatches,
        training=training,
        costs=costs,
        memory_cap=memory_cap,
        offloaded=offloaded,
    )


@checked(ScheduleError, costs=COSTS, ranks=or_none(COUNT), microbatches=or_none(COUNT))
def simulate(schedule: ScheduleLike, costs: Costs, *, ranks: int | None = None, microbatches: int | None = None) -> Timeline:
    """The timeline of one step: events, makespan, bubble and peak bytes per rank, in the units of `costs`.

    `schedule`: any form that `graphpp.compile` takes. A name or a function needs `microbatches`, and `ranks` unless the stages
    imply it. Raises `ScheduleError` if the table does not fit the costs or cannot run.
    """
    known = load_schedule(schedule)
    if isinstance(known, Schedule):
        return simulator.simulate(known, costs)
    if microbatches is None:
        raise ScheduleError(f"microbatches: the schedule {schedule!r} is a table for any number of them, so give one")
    stages = len(costs.stages)
    found = ranks or next((count for count in range(1, stages + 1) if default_stages(known, count) == stages), None)
    if found is None:
        raise ScheduleError(f"ranks: {stages} stages do not tell for how many ranks the schedule {schedule!r} is, so give them")
    return simulator.simulate(make_table(known, found, stages, microbatches), costs)
