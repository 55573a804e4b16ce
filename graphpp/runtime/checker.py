"""Proves, before the first action, that a schedule computes everything once and cannot hang.

Contract. After `check(schedule, ranks=, stages=, microbatches=)` returns:
    each (stage, microbatch) has F once, then B once, or I and then W once, all on the stage's one rank; nothing is
    out of range, doubled or left over; REDUCE_GRAD stands after its stage's last backward;
    if the table has communication: sends and receives stand exactly where neighbouring stages are on different
    ranks, a SEND after and a RECV before its computation, and each channel (rank -> rank) has one order at both ends;
    no cycle of waits exists (`graphpp.runtime.deadlock`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise, product

from graphpp.errors import ScheduleError
from graphpp.runtime.actions import PER_STAGE, Action, Kind
from graphpp.runtime.case import Case, Place
from graphpp.runtime.deadlock import check_progress
from graphpp.runtime.schedule import Schedule

_REPEATABLE = (Kind.UNSHARD, Kind.RESHARD)
_BACKWARDS = (Kind.B, Kind.I, Kind.W)


def check(schedule: Schedule, *, ranks: int, stages: int, microbatches: int) -> None:
    """Accept the schedule, with or without communication, or raise `ScheduleError`.

    The error names rank, column, the actions around it and what to do; for a deadlock, the cycle of waits. Refuses
    what torch's `_validate_schedule` lets pass: doubled actions, microbatches out of range, B beside I and W,
    deadlocks, missing or misordered receives.
    """
    if schedule.ranks != ranks:
        raise ScheduleError(
            f"schedule {schedule.name!r} has rows for {schedule.ranks} ranks, but {ranks} run it; give one row (in a "
            f"CSV: one line, blank lines count) per rank"
        )
    case = Case(schedule, stages, microbatches)
    _check_made_for(case)
    _place_all(case)
    _check_complete(case)
    _check_counts(case)
    _check_order(case)
    if schedule.has_communication:
        _check_messages(case)
        _check_channels(case)
    check_progress(case)


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
            _check_rank(case, place, leaf)
            if leaf in case.where and leaf.kind not in _REPEATABLE:
                first = case.where[leaf]
                raise case.refusal(place, f"{leaf} stands in column {first.column} already", "remove one of the two")
            case.where[leaf] = place


def _check_form(case: Case, place: Place, action: Action) -> None:
    overlap = action.kind is Kind.OVERLAP_F_B
    if overlap != bool(action.parts) or any(part.parts or not part.is_compute for part in action.parts):
        raise case.refusal(place, "only OVERLAP_F_B has parts, and they are F, B, I or W", "write (0F3;3B1)OVERLAP_F_B")


def _check_range(case: Case, place: Place, leaf: Action) -> None:
    if not 0 <= leaf.stage < case.stages:
        raise case.refusal(place, f"{leaf}: there is no stage {leaf.stage}", f"stages are 0..{case.stages - 1}")
    if leaf.kind in PER_STAGE:
        if leaf.microbatch is not None:
            raise case.refusal(place, f"{leaf}: {leaf.kind.value} is for all microbatches", "leave out the microbatch")
    elif leaf.microbatch is None or not 0 <= leaf.microbatch < case.microbatches:
        what = f"{leaf}: there is no microbatch {leaf.microbatch}"
        raise case.refusal(place, what, f"microbatches are 0..{case.microbatches - 1}")


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
    """The schedule counts like its caller; add_communication goes by the schedule's own numbers."""
    made_for = (case.schedule.stages, case.schedule.microbatches)
    if made_for != (case.stages, case.microbatches):
        raise ScheduleError(
            f"schedule {case.schedule.name!r} says it has {made_for[0]} stages and {made_for[1]} microbatches, but its "
            f"table has {case.stages} and {case.microbatches}; make it with the numbers of the table"
        )


def _check_one(case: Case, stage: int, microbatch: int) -> None:
    have = {kind for kind in (Kind.F, *_BACKWARDS) if Action(stage, kind, microbatch) in case.where}
    if Kind.B in have and have & {Kind.I, Kind.W}:
        double = Action(stage, min(have & {Kind.I, Kind.W}), microbatch)
        what = f"{double} beside {Action(stage, Kind.B, microbatch)}, and B is I and W together"
        raise case.refusal(case.where[double], what, "keep either B, or I and W")
    wanted = {Kind.F, Kind.B} if not have & {Kind.I, Kind.W} else {Kind.F, Kind.I, Kind.W}
    for kind in (Kind.F, *_BACKWARDS):
        if kind in wanted - have:
            missing = Action(stage, kind, microbatch)
            other = " (or I and W)" if kind is Kind.B else ""
            raise case.refusal(_nearest(case, missing), f"{missing} is missing from this rank", f"add {missing}{other}")


def _nearest(case: Case, missing: Action) -> Place:
    """Where to look for an action that is not there: at its microbatch on its stage, else at the stage's first cell."""
    same_stage = [(leaf, place) for leaf, place in case.where.items() if leaf.stage == missing.stage]
    return next((place for leaf, place in same_stage if leaf.microbatch == missing.microbatch), same_stage[0][1])


def _check_order(case: Case) -> None:
    """F before B or I, I before W, the last of them before REDUCE_GRAD."""
    last_backward = {
        leaf.stage: leaf for leaf in sorted(case.where, key=case.where.__getitem__) if leaf.kind in _BACKWARDS
    }
    for leaf in case.where:
        if leaf.kind in _BACKWARDS:
            _check_before(case, leaf._replace(kind=Kind.I if leaf.kind is Kind.W else Kind.F), leaf)
        elif leaf.kind is Kind.REDUCE_GRAD:
            _check_before(case, last_backward[leaf.stage], leaf)


def _check_before(case: Case, first: Action, then: Action) -> None:
    earlier, later = case.where[first], case.where[then]
    if earlier.column >= later.column:
        what = f"{then} needs {first}, which stands in column {earlier.column}"
        raise case.refusal(later, what, f"move {first} before {then}")


# ---------------------------------------------------------------------------------- sends and receives


def _readers(case: Case, receive: Action) -> Iterator[Action]:
    kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
    return (leaf for kind in kinds if (leaf := receive._replace(kind=kind)) in case.where)


def _check_messages(case: Case) -> None:
    """Exactly the sends and receives that the stages' ranks ask for, on the right side of their computations."""
    expected: set[Action] = set()
    for made, send, receive in case.messages():
        reader = next(_readers(case, receive))
        if send not in case.where:
            what = f"{send} is missing from this rank, so the result of {made} never leaves it"
            raise case.refusal(case.where[made], what, f"add {send} after {made}")
        if receive not in case.where:
            what = f"{receive} is missing from this rank, so {reader} would run on nothing"
            raise case.refusal(case.where[reader], what, f"add {receive} before {reader}")
        _check_before(case, made, send)
        _check_before(case, receive, reader)
        expected |= {send, receive}
    for leaf, place in case.where.items():
        if leaf.is_communication and leaf not in expected:
            what = f"{leaf} has no stage on another rank at its other end"
            raise case.refusal(place, what, "remove it: values cross only between neighbouring stages on two ranks")


def _check_channels(case: Case) -> None:
    """Between two ranks messages arrive in the order they are sent, so both ends must list them in one order."""
    sent: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    for _, send, receive in case.messages():
        sent.setdefault((case.where[send].rank, case.where[receive].rank), []).append((send, receive))
    for (source, target), pairs in sent.items():
        pairs.sort(key=lambda pair: case.where[pair[0]])
        for (send, receive), (later_send, later_receive) in pairwise(pairs):
            if case.where[receive] > case.where[later_receive]:
                what = (
                    f"{later_receive} stands before {receive} (column {case.where[receive].column}), but rank {source} "
                    f"sends {send} before {later_send} to rank {target}, so each would get the other's values"
                )
                raise case.refusal(case.where[later_receive], what, "receive in the order of the sends")
