"""Proves, before the first action, that a schedule computes everything once and cannot hang.

Contract. After `check(schedule, ranks=, stages=, microbatches=)` returns:
    each (stage, microbatch) has F once, then B once, or I and then W once, all on the stage's one rank; nothing is
    out of range, doubled or left over; with `training=False` F alone;
    parameters are whole where they are read, and REDUCE_GRAD stands after its stage's last backward
    (`graphpp.schedules.check.shard_order`);
    if the table has communication: sends and receives stand exactly where neighbouring stages are on different
    ranks, a SEND after and a RECV before its computation, and each channel (rank -> rank) has one order at both ends
    (`graphpp.schedules.check.channel_order`);
    no cycle of waits exists, under batched and unbatched point-to-point (`graphpp.schedules.check.deadlock`). An overlap waits
    for the inputs of all its parts before it starts, so no part needs another's result, not by way of other ranks either;
    if a memory cap is given: no rank holds more bytes of activations at any time (`graphpp.schedules.check.peak_memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from graphpp.errors import ScheduleError
from graphpp.schedules.check.case import Case, Place
from graphpp.schedules.check.channel_order import check_channels, check_messages
from graphpp.schedules.check.deadlock import check_progress
from graphpp.schedules.check.peak_memory import Each, check_memory
from graphpp.schedules.check.shard_order import check_reductions, check_sharding
from graphpp.schedules.table.actions import PER_STAGE, WITH_PARTS, Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule

_REPEATABLE = (Kind.UNSHARD, Kind.RESHARD)
_BACKWARDS = (Kind.B, Kind.I, Kind.W)
_FORWARDS = (Kind.F, Kind.SEND_F, Kind.RECV_F, *_REPEATABLE)


def check(
    schedule: Schedule,
    *,
    ranks: int,
    stages: int,
    microbatches: int,
    training: bool = True,
    costs: Each | None = None,
    memory_cap: int | Sequence[int] | None = None,
    offloaded: Sequence[OffloadWindow] = (),
) -> None:
    """Accept the schedule, with or without communication, or raise `ScheduleError`.

    `training=False` is for a table of forwards only. `memory_cap`: bytes of activations that a rank may hold, one number
    or one for each rank; `costs` then say how many a stage's microbatch takes (one, or one for each microbatch), and
    `offloaded` which of them are in the host's memory for a while.

    The error names rank, column, the actions around it and what to do; for a deadlock, the cycle of waits. Refuses
    what torch's `_validate_schedule` lets pass: doubled actions, microbatches out of range, B beside I and W,
    deadlocks, missing or misordered receives.
    """
    if schedule.ranks != ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has rows for {schedule.ranks} ranks, but {ranks} run it; give one row (in a "
            f"CSV: one line, blank lines count) per rank"
        )
    case = Case(schedule, stages, microbatches, training)
    _check_made_for(case)
    _place_all(case)
    _check_complete(case)
    _check_counts(case)
    _check_order(case)
    check_sharding(case)
    check_reductions(case)
    if schedule.has_communication:
        check_messages(case)
        check_channels(case)
    check_progress(case)
    if memory_cap is not None:
        check_memory(case, _given(costs), memory_cap, offloaded)


def _given(costs: Each | None) -> Each:
    if costs is None:
        raise ScheduleError("memory_cap is in bytes, and nothing says how many a microbatch takes: give costs= too")
    return costs


def _check_made_for(case: Case) -> None:
    """A table that is whole, but for other counts, is refused as a whole and not at one of its actions."""
    leaves = [leaf for _, _, action in case.schedule.cells() for leaf in action.leaves]
    computed = {(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind in (Kind.F, *_BACKWARDS)}
    forwards = {(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind is Kind.F}
    stages, microbatches = len({stage for stage, _ in computed}), len({microbatch for _, microbatch in computed})
    whole = forwards == computed == set(product(range(stages), range(microbatches)))
    if whole and computed and (stages, microbatches) != (case.stages, case.microbatches):
        raise ScheduleError(
            f"schedule {case.schedule.name!r} is a table for {stages} stages and {microbatches} microbatches, but the "
            f"pipeline runs {case.stages} stages and {case.microbatches} microbatches; write a table for these, or "
            f"split the model into {stages} stages and its batch into {microbatches} microbatches"
        )


# ---------------------------------------------------------------------------------- each action by itself


def _place_all(case: Case) -> None:
    """Fill `case.where`; afterwards nothing is out of range or doubled, and each stage has one rank."""
    for rank, column, action in case.schedule.cells():
        place = Place(rank, column)
        _check_form(case, place, action)
        for leaf in action.leaves:
            _check_range(case, place, leaf)
            _check_use(case, place, leaf)
            _check_rank(case, place, leaf)
            if leaf in case.where and leaf.kind not in _REPEATABLE:
                first = case.where[leaf]
                raise case.refusal(place, f"{leaf} stands in column {first.column} already", "remove one of the two")
            case.where[leaf] = place


def _check_form(case: Case, place: Place, action: Action) -> None:
    allowed = WITH_PARTS.get(action.kind)
    if bool(allowed) != bool(action.parts) or any(part.parts or part.kind not in (allowed or ()) for part in action.parts):
        what = "only OVERLAP_F_B and P2P have parts, the one of F, B, I or W, the other of sends and receives"
        raise case.refusal(place, what, "write (0F3;3B1)OVERLAP_F_B or (0SEND_F1;0RECV_B0)P2P")


def _check_range(case: Case, place: Place, leaf: Action) -> None:
    if not 0 <= leaf.stage < case.stages:
        raise case.refusal(place, f"{leaf}: there is no stage {leaf.stage}", f"stages are 0..{case.stages - 1}")
    if leaf.kind in PER_STAGE:
        if leaf.microbatch is not None:
            raise case.refusal(place, f"{leaf}: {leaf.kind.value} is for all microbatches", "leave out the microbatch")
    elif leaf.microbatch is None or not 0 <= leaf.microbatch < case.microbatches:
        what = f"{leaf}: there is no microbatch {leaf.microbatch}"
        raise case.refusal(place, what, f"microbatches are 0..{case.microbatches - 1}")


def _check_use(case: Case, place: Place, leaf: Action) -> None:
    if not case.training and leaf.kind not in _FORWARDS:
        what = f"{leaf} has no place in a table of forwards"
        raise case.refusal(place, what, "remove it, or take the forwards alone with Schedule.forward_only()")


def _check_rank(case: Case, place: Place, leaf: Action) -> None:
    home = case.schedule.rank_of_stage[leaf.stage]
    if home != place.rank:
        what = f"{leaf}: stage {leaf.stage} has actions on rank {home} too"
        raise case.refusal(place, what, f"put all of stage {leaf.stage} on one rank")


# ---------------------------------------------------------------------------------- each (stage, microbatch)


def _check_complete(case: Case) -> None:
    """Each (stage, microbatch) has F, and either B, or I and W."""
    for stage in range(case.stages):
        if stage not in case.schedule.rank_of_stage:
            raise ScheduleError(
                f"schedule {case.schedule.name!r}: stage {stage} of {case.stages} stands on no rank; "
                "add its actions to the row of the rank that holds it"
            )
        for microbatch in range(case.microbatches):
            _check_one(case, stage, microbatch)


def _check_counts(case: Case) -> None:
    """The schedule counts like its caller; add_communication goes by the schedule's own numbers, and so does recomputing."""
    made_for = (case.schedule.stages, case.schedule.microbatches)
    if made_for != (case.stages, case.microbatches):
        raise ScheduleError(
            f"schedule {case.schedule.name!r} says it has {made_for[0]} stages and {made_for[1]} microbatches, but its "
            f"table has {case.stages} and {case.microbatches}; make it with the numbers of the table"
        )
    for stage, microbatch in sorted(case.schedule.recomputed or ()):
        if stage >= case.stages or microbatch >= case.microbatches:
            raise ScheduleError(
                f"the schedule {case.schedule.name!r} recomputes stage {stage} at microbatch {microbatch}, but has "
                f"{case.stages} stages and {case.microbatches} microbatches, counted from 0"
            )


def _check_one(case: Case, stage: int, microbatch: int) -> None:
    have = {kind for kind in (Kind.F, *_BACKWARDS) if Action(stage, kind, microbatch) in case.where}
    if Kind.B in have and have & {Kind.I, Kind.W}:
        double = Action(stage, min(have & {Kind.I, Kind.W}), microbatch)
        what = f"{double} beside {Action(stage, Kind.B, microbatch)}, and B is I and W together"
        raise case.refusal(case.where[double], what, "keep either B, or I and W")
    for kind in (Kind.F, *_BACKWARDS):
        if kind in _wanted(case, have) - have:
            missing = Action(stage, kind, microbatch)
            other = " (or I and W)" if kind is Kind.B else ""
            raise case.refusal(_nearest(case, missing), f"{missing} is missing from this rank", f"add {missing}{other}")


def _wanted(case: Case, have: set[Kind]) -> set[Kind]:
    if not case.training:
        return {Kind.F}
    return {Kind.F, Kind.I, Kind.W} if have & {Kind.I, Kind.W} else {Kind.F, Kind.B}


def _nearest(case: Case, missing: Action) -> Place:
    """Where to look for an action that is not there: at its microbatch on its stage, else at the stage's first cell."""
    same_stage = [(leaf, place) for leaf, place in case.where.items() if leaf.stage == missing.stage]
    return next((place for leaf, place in same_stage if leaf.microbatch == missing.microbatch), same_stage[0][1])


def _check_order(case: Case) -> None:
    """F before B or I, I before W."""
    for leaf in case.where:
        if leaf.kind in _BACKWARDS:
            case.check_before(leaf._replace(kind=Kind.I if leaf.kind is Kind.W else Kind.F), leaf)
