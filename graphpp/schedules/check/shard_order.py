"""Check UNSHARD, RESHARD and REDUCE_GRAD: parameters are unsharded while they are read, gradients are reduced once.

Contract
    in    a `ScheduleUnderCheck` with `where` filled, complete and in order
    out   nothing; or `ScheduleError` at the action that is missing or misplaced

A stage with any UNSHARD or RESHARD has them alternate, UNSHARD first and RESHARD last, and each of its computations stands
between an UNSHARD and the next RESHARD. A stage without either keeps its parameters unsharded. REDUCE_GRAD stands at most once
per stage, after its last B or W; without one the runner reduces at the end of the step. The tables of torch's
`_add_unshard_reshard` and `_add_reduce_grad` are accepted.
"""

from __future__ import annotations

from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import BACKWARDS, Action, Kind


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
    """Raise unless REDUCE_GRAD stands after its stage's last backward."""
    last = {leaf.stage: leaf for leaf in subject.where if leaf.kind in BACKWARDS}
    for leaf in (leaf for leaf in subject.where if leaf.kind is Kind.REDUCE_GRAD):
        subject.check_before(last[leaf.stage], leaf)
