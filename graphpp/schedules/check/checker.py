"""Prove, before the first action runs, that a schedule computes everything once and cannot hang. After `check`:

- Each (stage, microbatch) has one F, then one B, or one I and then one W, all on the stage's one rank; one R may stand between
  F and B or I. No action is out of range, doubled or left over. With `training=False` each has F alone.
- Parameters are unsharded wherever a computation reads them, and REDUCE_GRAD comes after its stage's last backward
  (`order.py`).
- If the table has communication: sends and receives stand exactly where neighbouring stages are on different ranks, a SEND
  after and a RECV before its computation, and both ends of a channel (rank -> rank) have one order (`order.py`).
- No cycle of waits exists, with batched or unbatched point-to-point messages (`deadlock.py`). An overlap waits for the inputs
  of all its parts, so no part may depend on another part, not even through other ranks.
- If a memory cap is given: no rank ever has more bytes of activations alive than the cap (`step_memory.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from graphpp.errors import ScheduleError
from graphpp.schedules.check.deadlock import check_progress
from graphpp.schedules.check.order import check_channels, check_messages, check_reductions, check_sharding
from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.check.step_memory import MicrobatchCosts, check_memory
from graphpp.schedules.table.actions import BACKWARDS, PER_STAGE, Action, Kind, has_right_parts
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

_REPEATABLE = (Kind.UNSHARD, Kind.RESHARD)
_FORWARDS = (Kind.F, Kind.SEND_F, Kind.RECV_F, *_REPEATABLE)


def check(
    schedule: Schedule,
    *,
    ranks: int,
    stages: int,
    microbatches: int,
    training: bool = True,
    costs: MicrobatchCosts | None = None,
    memory_cap: int | Sequence[int] | None = None,
    offloaded: Sequence[OffloadWindow] = (),
) -> None:
    """Accept the schedule, with or without communication, or raise `ScheduleError`.

    `training=False` is for a table of forwards only. `memory_cap`: the most bytes of activations alive on a rank, for all ranks
    or one for each; needs `costs`, for all microbatches or one per microbatch. `offloaded`: activations that are evicted to the
    host for a while. The error names rank, column, the actions around the fault and a remedy; for a deadlock, the cycle of
    waits. Refuses tables that torch's `_validate_schedule` accepts: doubled actions, microbatches out of range, B together with
    I and W, deadlocks, missing or misordered receives.
    """
    if schedule.ranks != ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has rows for {schedule.ranks} ranks, but {ranks} run it; give one row (in a "
            f"CSV: one line, blank lines count) per rank"
        )
    subject = ScheduleUnderCheck(schedule, stages, microbatches, training)
    _check_made_for(subject)
    _place_all(subject)
    _check_complete(subject)
    _check_counts(subject)
    for leaf in subject.where:  # F before B or I, I before W
        if leaf.kind in BACKWARDS:
            subject.check_before(leaf._replace(kind=Kind.I if leaf.kind is Kind.W else Kind.F), leaf)
        if leaf.kind is Kind.R:
            whole = leaf._replace(kind=Kind.B)
            subject.check_before(leaf._replace(kind=Kind.F), leaf)
            subject.check_before(leaf, whole if whole in subject.where else leaf._replace(kind=Kind.I))
    check_sharding(subject)
    check_reductions(subject)
    if schedule.has_communication:
        check_messages(subject)
        check_channels(subject)
    check_progress(subject)
    if memory_cap is not None:
        if costs is None:
            raise ScheduleError("memory_cap is in bytes, and nothing says how many a microbatch takes: give costs= too")
        check_memory(subject, costs, memory_cap, offloaded)


def _check_made_for(subject: ScheduleUnderCheck) -> None:
    """Refuse a complete table for other counts as a whole, instead of at one of its actions."""
    leaves = [leaf for _, _, action in subject.schedule.cells() for leaf in action.leaves]
    computed = {(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind in (Kind.F, *BACKWARDS)}
    forwards = {(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind is Kind.F}
    stages, microbatches = len({stage for stage, _ in computed}), len({microbatch for _, microbatch in computed})
    whole = forwards == computed == set(product(range(stages), range(microbatches)))
    if whole and computed and (stages, microbatches) != (subject.stages, subject.microbatches):
        raise ScheduleError(
            f"schedule {subject.schedule.name!r} is a table for {stages} stages and {microbatches} microbatches, but the "
            f"pipeline runs {subject.stages} stages and {subject.microbatches} microbatches; write a table for these, or "
            f"split the model into {stages} stages and its batch into {microbatches} microbatches"
        )


def _place_all(subject: ScheduleUnderCheck) -> None:
    """Fill `subject.where`. Afterwards no action is out of range or doubled, and each stage has one rank."""
    for rank, column, action in subject.schedule.cells():
        place = Position(rank, column)
        if not has_right_parts(action):
            what = "only OVERLAP_F_B and P2P have parts, the one of F, B, I or W, the other of sends and receives"
            raise subject.refusal(place, what, "write (0F3;3B1)OVERLAP_F_B or (0SEND_F1;0RECV_B0)P2P")
        for leaf in action.leaves:
            _check_leaf(subject, place, leaf)
            if leaf in subject.where and leaf.kind not in _REPEATABLE:
                first = subject.where[leaf]
                raise subject.refusal(place, f"{leaf} stands in column {first.column} already", "remove one of the two")
            subject.where[leaf] = place


def _check_leaf(subject: ScheduleUnderCheck, place: Position, leaf: Action) -> None:
    if not 0 <= leaf.stage < subject.stages:
        raise subject.refusal(place, f"{leaf}: there is no stage {leaf.stage}", f"stages are 0..{subject.stages - 1}")
    if leaf.kind in PER_STAGE:
        if leaf.microbatch is not None:
            raise subject.refusal(place, f"{leaf}: {leaf.kind.value} is for all microbatches", "leave out the microbatch")
    elif leaf.microbatch is None or not 0 <= leaf.microbatch < subject.microbatches:
        what = f"{leaf}: there is no microbatch {leaf.microbatch}"
        raise subject.refusal(place, what, f"microbatches are 0..{subject.microbatches - 1}")
    if not subject.training and leaf.kind not in _FORWARDS:
        what = f"{leaf} has no place in a table of forwards"
        raise subject.refusal(place, what, "remove it, or take the forwards alone with Schedule.forward_only()")
    home = subject.schedule.rank_of_stage[leaf.stage]
    if home != place.rank:
        what = f"{leaf}: stage {leaf.stage} has actions on rank {home} too"
        raise subject.refusal(place, what, f"put all of stage {leaf.stage} on one rank")


def _check_complete(subject: ScheduleUnderCheck) -> None:
    """Each (stage, microbatch) has F, and either B, or I and W."""
    for stage in range(subject.stages):
        if stage not in subject.schedule.rank_of_stage:
            raise ScheduleError(
                f"schedule {subject.schedule.name!r}: stage {stage} of {subject.stages} stands on no rank; "
                "add its actions to the row of the rank that holds it"
            )
        for microbatch in range(subject.microbatches):
            _check_one(subject, stage, microbatch)


def _check_counts(subject: ScheduleUnderCheck) -> None:
    """Raise if the schedule's own counts differ from the pipeline's: rewrites and recomputation use the schedule's counts."""
    made_for = (subject.schedule.stages, subject.schedule.microbatches)
    if made_for != (subject.stages, subject.microbatches):
        raise ScheduleError(
            f"schedule {subject.schedule.name!r} says it has {made_for[0]} stages and {made_for[1]} microbatches, but its "
            f"table has {subject.stages} and {subject.microbatches}; make it with the numbers of the table"
        )
    for stage, microbatch in sorted(subject.schedule.recomputed or ()):
        if stage >= subject.stages or microbatch >= subject.microbatches:
            raise ScheduleError(
                f"the schedule {subject.schedule.name!r} recomputes stage {stage} at microbatch {microbatch}, but has "
                f"{subject.stages} stages and {subject.microbatches} microbatches, counted from 0"
            )


def _check_one(subject: ScheduleUnderCheck, stage: int, microbatch: int) -> None:
    have = {kind for kind in (Kind.F, *BACKWARDS) if Action(stage, kind, microbatch) in subject.where}
    if Kind.B in have and have & {Kind.I, Kind.W}:
        double = Action(stage, min(have & {Kind.I, Kind.W}), microbatch)
        what = f"{double} beside {Action(stage, Kind.B, microbatch)}, and B is I and W together"
        raise subject.refusal(subject.where[double], what, "keep either B, or I and W")
    backward = {Kind.I, Kind.W} if have & {Kind.I, Kind.W} else {Kind.B}
    required = {Kind.F, *(backward if subject.training else ())}
    for kind in (Kind.F, *BACKWARDS):
        if kind in required - have:
            missing = Action(stage, kind, microbatch)
            other = " (or I and W)" if kind is Kind.B else ""
            raise subject.refusal(_nearest(subject, missing), f"{missing} is missing from this rank", f"add {missing}{other}")


def _nearest(subject: ScheduleUnderCheck, missing: Action) -> Position:
    """The cell to show for a missing action: one with its stage and microbatch, else the first cell of its stage."""
    same_stage = [(leaf, place) for leaf, place in subject.where.items() if leaf.stage == missing.stage]
    return next((place for leaf, place in same_stage if leaf.microbatch == missing.microbatch), same_stage[0][1])
