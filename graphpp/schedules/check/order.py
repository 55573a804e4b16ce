"""Check the messages of a table, and UNSHARD, RESHARD and REDUCE_GRAD: none missing or left over, each in its place.

- In: a `ScheduleUnderCheck` with `where` filled, complete and in order. `ScheduleError` is raised at the action that is
  missing, left over or misplaced.
- A channel is an ordered pair of ranks. Its messages arrive in the order in which they are posted, whatever their kind and
  stage, so both ends must list them in the same order. The parts of a batch (P2P) are posted in the order they are written.
- A stage with any UNSHARD or RESHARD alternates them, UNSHARD first and RESHARD last, and each of its computations is between
  an UNSHARD and the next RESHARD. A stage without either stays unsharded. REDUCE_GRAD comes at most once per stage, after its
  last B or W; without one the runner reduces at the end of the step. The tables of torch's `_add_unshard_reshard` and
  `_add_reduce_grad` are accepted.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from graphpp.schedules.check.schedule_under_check import Crossing, Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import BACKWARDS, Action, Kind, computations


def check_messages(subject: ScheduleUnderCheck) -> None:
    """Raise unless the table has exactly the sends and receives that its placement of stages needs, each on the right side."""
    expected: set[Action] = set()
    for crossing in subject.messages:
        _check_message(subject, crossing)
        expected.update((crossing.send, crossing.receive))
    for leaf, place in subject.where.items():
        if leaf.is_communication and leaf not in expected:
            what = f"{leaf} has no stage on another rank at its other end"
            raise subject.refusal(place, what, "remove it: values cross only between neighbouring stages on two ranks")


def _check_message(subject: ScheduleUnderCheck, crossing: Crossing) -> None:
    made, send, receive = crossing
    reader = next(leaf for leaf in computations(receive) if leaf in subject.where)
    if send not in subject.where:
        what = f"{send} is missing from this rank, so the result of {made} never leaves it"
        raise subject.refusal(subject.where[made], what, f"add {send} after {made}")
    if receive not in subject.where:
        what = f"{receive} is missing from this rank, so {reader} would run on nothing"
        raise subject.refusal(subject.where[reader], what, f"add {receive} before {reader}")
    subject.check_before(made, send)
    subject.check_before(receive, reader)


def check_channels(subject: ScheduleUnderCheck) -> None:
    """Raise unless both ends of every channel list its messages in the same order."""
    position = {leaf: place for place, leaf in enumerate(subject.where)}  # includes the order of the parts of a batch
    rank_of = subject.schedule.rank_of_stage
    channels: dict[tuple[int, int], list[Crossing]] = defaultdict(list)
    for crossing in subject.messages:
        channels[rank_of[crossing.send.stage], rank_of[crossing.receive.stage]].append(crossing)
    for crossings in channels.values():
        crossings.sort(key=lambda crossing: position[crossing.send])
        for first, then in pairwise(crossings):
            if position[first.receive] > position[then.receive]:
                raise _misordered(subject, first, then)


def _misordered(subject: ScheduleUnderCheck, first: Crossing, then: Crossing) -> Exception:
    source, here = subject.where[first.send].rank, subject.where[then.receive]
    what = (
        f"{then.receive} stands before {first.receive} (column {subject.where[first.receive].column}), but rank {source} "
        f"sends {first.send} before {then.send} to rank {here.rank}, so each would get the other's values"
    )
    return subject.refusal(Position(*here), what, "receive in the order of the sends")


def check_sharding(subject: ScheduleUnderCheck) -> None:
    """Raise unless every computation of a sharded stage finds its parameters unsharded."""
    cells = list(subject.schedule.cells())
    sharded = {action.stage for _, _, action in cells if action.kind in (Kind.UNSHARD, Kind.RESHARD)}
    whole: dict[int, Position] = {}  # stage -> where it was unsharded
    for rank, column, action in cells if sharded else ():
        for leaf in action.leaves:
            if leaf.stage in sharded:
                _follow(subject, whole, Position(rank, column), leaf)
    for stage, place in whole.items():
        what = f"stage {stage} is never resharded after this, so its whole parameters stay in memory"
        raise subject.refusal(place, what, f"add {stage}RESHARD after the last computation of stage {stage}")


def _follow(subject: ScheduleUnderCheck, whole: dict[int, Position], here: Position, leaf: Action) -> None:
    """Apply one action of a sharded stage to `whole`, the stages that are unsharded now."""
    stage = leaf.stage
    if leaf.kind is Kind.UNSHARD:
        if stage in whole:
            what = f"{leaf}: stage {stage} is unsharded since column {whole[stage].column}"
            raise subject.refusal(here, what, f"remove one of the two, or add {stage}RESHARD between them")
        whole[stage] = here
    elif leaf.kind is Kind.RESHARD:
        if whole.pop(stage, None) is None:
            raise subject.refusal(here, f"{leaf}: stage {stage} is not unsharded here", "remove it, or unshard before it")
    elif leaf.is_compute and stage not in whole:
        what = f"{leaf} needs the parameters of stage {stage}, which are sharded here"
        raise subject.refusal(here, what, f"add {stage}UNSHARD before it, and {stage}RESHARD after it")


def check_reductions(subject: ScheduleUnderCheck) -> None:
    """Raise unless REDUCE_GRAD comes after its stage's last backward."""
    last = {leaf.stage: leaf for leaf in subject.where if leaf.kind in BACKWARDS}
    for leaf in (leaf for leaf in subject.where if leaf.kind is Kind.REDUCE_GRAD):
        subject.check_before(last[leaf.stage], leaf)
