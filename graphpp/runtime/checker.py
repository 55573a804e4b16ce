"""Proves, before the first action, that a schedule computes everything once and cannot hang.

Contract. After `check(schedule, ranks=, stages=, microbatches=)` returns:
    each (stage, microbatch) has F once, then B once, or I and then W once, all on the stage's one rank; nothing is
    out of range, doubled or left over; REDUCE_GRAD stands after its stage's last backward;
    if the table has communication: sends and receives stand exactly where neighbouring stages are on different
    ranks, a SEND after and a RECV before its computation, and each channel (rank -> rank) has one order at both ends;
    no cycle of waits exists.

The proof of progress is one graph. Its nodes are the cells, a send and its receive being ONE node (rendezvous: a
message is over when both ends have come to it). A cell waits for the computation before it on its rank and for what
it reads; a message also waits for the message before it on either rank. That is the strictest transport there is
(NCCL's batched point-to-point: one communicator and stream per rank, nothing buffered); each laxer one (a communicator
per pair, gloo's eager sends) has fewer waits. So no cycle here means no hang on any of them.

Ranks and columns in messages count from 0, like the rows and cells of the printed table without its labels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.runtime.actions import PER_STAGE, SENDS, Action, Kind, message, upstream
from graphpp.runtime.schedule import Schedule

_REPEATABLE = (Kind.UNSHARD, Kind.RESHARD)
_BACKWARDS = (Kind.B, Kind.I, Kind.W)


class _Place(NamedTuple):
    rank: int
    column: int


@dataclass(frozen=True)
class _Case:
    """A schedule, what it must fit, and where each single action stands."""

    schedule: Schedule
    stages: int
    microbatches: int
    where: dict[Action, _Place] = field(default_factory=dict)

    def at(self, place: _Place) -> Action | None:
        return self.schedule.table[place.rank][place.column]

    def refusal(self, place: _Place, what: str, remedy: str) -> ScheduleError:
        """The error for a fault at `place`, showing up to three cells on either side."""
        row = ["." if cell is None else str(cell) for cell in self.schedule.table[place.rank]]
        row[place.column] = f">>> {row[place.column]} <<<"
        first, end = max(0, place.column - 3), place.column + 4
        window = ["..."] * (first > 0) + row[first:end] + ["..."] * (end < len(row))
        return ScheduleError(
            f"schedule {self.schedule.name!r}, rank {place.rank}, column {place.column}: {what}; {remedy}\n"
            f"    r{place.rank} {' '.join(window)}"
        )


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
    case = _Case(schedule, stages, microbatches)
    _place_all(case)
    _check_complete(case)
    _check_counts(case)
    _check_order(case)
    if schedule.has_communication:
        _check_messages(case)
        _check_channels(case)
    _check_progress(case)


# ---------------------------------------------------------------------------------- each action by itself


def _place_all(case: _Case) -> None:
    """Fill `case.where`; afterwards nothing is out of range or doubled, and each stage has one rank."""
    for rank, column, action in case.schedule.cells():
        place = _Place(rank, column)
        _check_form(case, place, action)
        for leaf in action.leaves:
            _check_range(case, place, leaf)
            _check_rank(case, place, leaf)
            if leaf in case.where and leaf.kind not in _REPEATABLE:
                first = case.where[leaf]
                raise case.refusal(place, f"{leaf} stands in column {first.column} already", "remove one of the two")
            case.where[leaf] = place


def _check_form(case: _Case, place: _Place, action: Action) -> None:
    overlap = action.kind is Kind.OVERLAP_F_B
    if overlap != bool(action.parts) or any(part.parts or not part.is_compute for part in action.parts):
        raise case.refusal(place, "only OVERLAP_F_B has parts, and they are F, B, I or W", "write (0F3;3B1)OVERLAP_F_B")


def _check_range(case: _Case, place: _Place, leaf: Action) -> None:
    if not 0 <= leaf.stage < case.stages:
        raise case.refusal(place, f"{leaf}: there is no stage {leaf.stage}", f"stages are 0..{case.stages - 1}")
    if leaf.kind in PER_STAGE:
        if leaf.microbatch is not None:
            raise case.refusal(place, f"{leaf}: {leaf.kind.value} is for all microbatches", "leave out the microbatch")
    elif leaf.microbatch is None or not 0 <= leaf.microbatch < case.microbatches:
        what = f"{leaf}: there is no microbatch {leaf.microbatch}"
        raise case.refusal(place, what, f"microbatches are 0..{case.microbatches - 1}")


def _check_rank(case: _Case, place: _Place, leaf: Action) -> None:
    home = case.schedule.rank_of_stage[leaf.stage]
    if home != place.rank:
        what = f"{leaf}: stage {leaf.stage} has actions on rank {home} too"
        raise case.refusal(place, what, f"put all of stage {leaf.stage} on one rank")


# ---------------------------------------------------------------------------------- each (stage, microbatch)


def _check_complete(case: _Case) -> None:
    """Each (stage, microbatch) has F, and either B, or I and W."""
    for stage in range(case.stages):
        if stage not in case.schedule.rank_of_stage:
            raise ScheduleError(
                f"schedule {case.schedule.name!r}: stage {stage} stands on no rank; add its actions to the row of the "
                f"rank that holds it, or make a table for {case.schedule.stages} stages into one for {case.stages}"
            )
        for microbatch in range(case.microbatches):
            _check_one(case, stage, microbatch)


def _check_counts(case: _Case) -> None:
    """The schedule counts like its caller; add_communication goes by the schedule's own numbers."""
    made_for = (case.schedule.stages, case.schedule.microbatches)
    if made_for != (case.stages, case.microbatches):
        raise ScheduleError(
            f"schedule {case.schedule.name!r} says it has {made_for[0]} stages and {made_for[1]} microbatches, but its "
            f"table has {case.stages} and {case.microbatches}; make it with the numbers of the table"
        )


def _check_one(case: _Case, stage: int, microbatch: int) -> None:
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


def _nearest(case: _Case, missing: Action) -> _Place:
    """Where to look for an action that is not there: at its microbatch on its stage, else at the stage's first cell."""
    same_stage = [(leaf, place) for leaf, place in case.where.items() if leaf.stage == missing.stage]
    return next((place for leaf, place in same_stage if leaf.microbatch == missing.microbatch), same_stage[0][1])


def _check_order(case: _Case) -> None:
    """F before B or I, I before W, the last of them before REDUCE_GRAD."""
    last_backward = {
        leaf.stage: leaf for leaf in sorted(case.where, key=case.where.__getitem__) if leaf.kind in _BACKWARDS
    }
    for leaf in case.where:
        if leaf.kind in _BACKWARDS:
            _check_before(case, leaf._replace(kind=Kind.I if leaf.kind is Kind.W else Kind.F), leaf)
        elif leaf.kind is Kind.REDUCE_GRAD:
            _check_before(case, last_backward[leaf.stage], leaf)


def _check_before(case: _Case, first: Action, then: Action) -> None:
    earlier, later = case.where[first], case.where[then]
    if earlier.column >= later.column:
        what = f"{then} needs {first}, which stands in column {earlier.column}"
        raise case.refusal(later, what, f"move {first} before {then}")


# ---------------------------------------------------------------------------------- sends and receives


def _messages(case: _Case) -> Iterator[tuple[Action, Action, Action]]:
    """(computation, send, receive) wherever a result goes to another rank."""
    rank_of = case.schedule.rank_of_stage
    for leaf in case.where:
        pair = message(leaf, case.stages)
        if pair and rank_of[pair[0].stage] != rank_of[pair[1].stage]:
            yield leaf, *pair


def _readers(case: _Case, receive: Action) -> Iterator[Action]:
    kinds = (Kind.F,) if receive.kind is Kind.RECV_F else (Kind.B, Kind.I)
    return (leaf for kind in kinds if (leaf := receive._replace(kind=kind)) in case.where)


def _check_messages(case: _Case) -> None:
    """Exactly the sends and receives that the stages' ranks ask for, on the right side of their computations."""
    expected: set[Action] = set()
    for made, send, receive in _messages(case):
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


def _check_channels(case: _Case) -> None:
    """Between two ranks messages arrive in the order they are sent, so both ends must list them in one order."""
    sent: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    for _, send, receive in _messages(case):
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


# ---------------------------------------------------------------------------------- progress


def _check_progress(case: _Case) -> None:
    try:
        TopologicalSorter(_waits(case)).prepare()
    except CycleError as fault:
        # graphlib lists each node before the one that waits for it; read backwards, each waits for the next.
        cycle = _without_steps(fault.args[1][:0:-1])
        lines = [f"    {_wait(case, *hop)}" for hop in pairwise([*cycle, cycle[0]])]
        note = " (a message is over when both of its ends have come to it)" if case.schedule.has_communication else ""
        remedy = "\n".join(["reorder one of these ranks so that the cycle opens", *lines])
        raise case.refusal(cycle[0], f"deadlock, each of these waits for the next{note}", remedy) from None


def _waits(case: _Case) -> dict[_Place, set[_Place]]:
    """Each cell -> the cells that must be over before it; a receive stands for itself at the place of its send."""
    node = {place: place for place in case.where.values()}
    if case.schedule.has_communication:
        node |= {case.where[receive]: case.where[send] for _, send, receive in _messages(case)}
    graph: dict[_Place, set[_Place]] = {place: set() for place in node.values()}
    for rank, row in enumerate(case.schedule.table):
        last: dict[bool, _Place] = {}
        for column, action in enumerate(row):
            if action is None:
                continue
            here = node[_Place(rank, column)]
            graph[here].update(last[side] for side in {False, action.is_communication} if side in last)
            graph[here].update(node[place] for place in _read(case, action))
            last[action.is_communication] = here
    return graph


def _read(case: _Case, action: Action) -> Iterator[_Place]:
    """The places a computation's inputs come from: a neighbour's computation, or the message that carries it."""
    for leaf in action.leaves:
        for maker in upstream(leaf, case.stages):
            if maker in case.where:
                pair = message(maker, case.stages)
                yield case.where.get(pair[0], case.where[maker]) if pair else case.where[maker]


def _without_steps(cycle: list[_Place]) -> list[_Place]:
    """Leave out the nodes in the middle of a run of earlier and earlier cells of one rank."""

    def passed_by(before: _Place, node: _Place, after: _Place) -> bool:
        return before.rank == node.rank == after.rank and before.column > node.column > after.column

    around = zip([cycle[-1], *cycle], cycle, [*cycle[1:], cycle[0]], strict=False)
    return [node for before, node, after in around if not passed_by(before, node, after)]


def _wait(case: _Case, waiter: _Place, waited: _Place) -> str:
    order = waiter.rank == waited.rank and waiter.column > waited.column
    return f"{_name(case, waiter)} {'comes after' if order else 'waits for'} {_name(case, waited)}"


def _name(case: _Case, place: _Place) -> str:
    action = case.at(place)
    text = f"{action} (rank {place.rank}, column {place.column})"
    if action is None or action.kind not in SENDS:
        return text
    _, receive = next((send, receive) for _, send, receive in _messages(case) if send == action)
    other = case.where[receive]
    return f"{text} -> {receive} (rank {other.rank}, column {other.column})"
