"""ZB-V and DualPipeV, on a V: rank r has stages r and 2 ranks - 1 - r, so a microbatch turns round on the last rank.

In the step lists 0 is stage r on the way down, and 1 is the stage on the way up. The last stage, with the loss, is on rank 0.
In the pictures a column is one unit of time for any F, I or W of one stage. Tables equal torch's, idle cells included.
"""

from __future__ import annotations

from collections import deque

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import stage_ids, stages_per_rank, two_per_rank
from graphpp.schedules.table.schedule import Row, Schedule


@stages_per_rank(2)
def zbv_zero_bubble(ranks: int, stages: int, microbatches: int) -> Schedule:
    """ZB-V: no bubble with the memory of 1F1B, where F, I and W cost the same (arXiv:2401.10241, section 6).

    r0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3
    r1 .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3

    Fewer than 2 ranks - 1 microbatches leave holes in the table for that many. Equal to torch's `ScheduleZBVZeroBubble`.
    """
    two_per_rank("ZBVZeroBubble", ranks, stages, microbatches)
    full = max(microbatches, 2 * ranks - 1)

    def row(rank: int) -> Row:
        hops = ranks - rank
        remaining = full - (2 * ranks - 1 - rank)  # forwards of the first stage after the warm-up
        script = _Script(*stage_ids(rank, ranks, stages, "v"))
        script.write("F0", 2 * hops - 1)
        script.write("F1 F0", rank)
        script.write("F1 I1 W1", hops)
        script.write("F0 I0 W0 F1 I1 W1", remaining)
        script.write("I0 W0 F1 I1 W1", full - ranks - remaining)
        script.write("I0 I1", rank)
        script.write("I0 W0", hops)
        script.write("W1", rank)
        script.write("W0", rank)
        cells = (cell if (cell.microbatch or 0) < microbatches else None for cell in script.actions)
        return (None,) * rank + tuple(cells)

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "ZBVZeroBubble")


@stages_per_rank(2)
def dual_pipe_v(ranks: int, stages: int, microbatches: int) -> Schedule:
    """DualPipe folded to a V: a forward and a backward of different microbatches overlap.

    r0 0F0 0F1 0F2 3F0 3I0 3W0 3F1 (0F3;3B1)OVERLAP_F_B (3F2;0B0)OVERLAP_F_B 3B2 (3F3;0B1)OVERLAP_F_B 3B3 0I2 0W2 0I3 0W3
    r1 1F0 2F0 1F1 2F1 1F2 2B0 (2F2;1B0)OVERLAP_F_B (1F3;2B1)OVERLAP_F_B (2F3;1B1)OVERLAP_F_B 2B2 1B2 2I3 1I3 2W3 1W3

    At least as many microbatches as stages. The steps are those of DeepSeek's DualPipe (arXiv:2412.19437), cut in half.
    Equal to torch's `ScheduleDualPipeV`, which has no idle cells: a column is only a position.
    """
    two_per_rank("DualPipeV", ranks, stages, microbatches)
    if microbatches < stages:
        raise ScheduleError(
            f"DualPipeV needs at least as many microbatches as stages: {microbatches} do not fill {stages} stages on "
            f"{ranks} ranks; take {stages} or more, or ZBVZeroBubble"
        )

    def row(rank: int) -> Row:
        hops = ranks - 1 - rank
        main = microbatches - 2 * ranks + rank + 1
        first = "F0 B1" if rank == ranks - 1 else "F0+B1"  # no overlap on the last rank: one bubble less
        script = _Script(*stage_ids(rank, ranks, stages, "v"))
        script.write("F0", 2 * hops)
        script.write("F0 F1", rank + 1)
        script.write("I1 W F1", hops)
        script.write(f"{first} F1+B0", min(main, 1))
        script.write("F0+B1 F1+B0", main - 1)
        script.write("B1 F1+B0", hops)
        last = ["B1", "B0"] * (rank + 1)  # the second half of them split
        script.write(" ".join([*last[: rank + 1], *(step.replace("B", "I") for step in last[rank + 1 :])]))
        script.write("W I0", hops)
        script.write("W", rank + 1)
        return tuple(script.actions)

    return Schedule(tuple(map(row, range(ranks))), stages, microbatches, "DualPipeV")


class _Script:
    """Writes a rank's actions; each kind of each stage counts its own microbatches."""

    def __init__(self, *stages: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: dict[tuple[str, int], int] = {}
        self._pending: deque[Action] = deque()  # the Ws of Is, oldest first

    def write(self, steps: str, times: int = 1) -> None:
        """`F0`: next forward of the first stage; likewise I, W, B. `F0+B1`: an overlap. `W`: the oldest pending W, if any."""
        for step in steps.split() * times:
            if step == "W":
                self.actions += [self._pending.popleft()] if self._pending else []
                continue
            parts = tuple(map(self._take, step.split("+")))
            self.actions.append(parts[0] if len(parts) == 1 else Action(-1, Kind.OVERLAP_F_B, None, parts))

    def _take(self, step: str) -> Action:
        kind, chunk = Kind(step[0]), int(step[1])
        # B is I and W together, and counts with the Is
        turn = (Kind.I if kind is Kind.B else kind), chunk
        microbatch = self._next.get(turn, 0)
        self._next[turn] = microbatch + 1
        action = Action(self._stages[chunk], kind, microbatch)
        if kind is Kind.I:
            self._pending.append(action._replace(kind=Kind.W))
        return action
