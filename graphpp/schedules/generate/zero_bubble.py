"""Zero bubble with the stages in a loop: weight gradients, for which no other rank waits, fill the bubbles.

- Every backward is an I (input gradients, for which the stage below waits) and a W (weight gradients). In the pictures time
  runs to the right, one unit for any F, I or W, and `.` is a rank that waits.
- One rule makes all three schedules (Qi et al. 2023, arXiv:2401.10241). A rank warms up with some forwards, the more the
  further it is from the last rank. Then F and I alternate, and W follows `lag` microbatches behind I; `lag` grows with the
  distance from the first rank. The delayed Ws run at the end; under ZB1P and ZB2P also wherever the rank would wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphpp.schedules.generate.gpipe_1f1b import one_after_another
from graphpp.schedules.generate.megatron_interleaved import schedule_table
from graphpp.schedules.rewrite.add_idle_cells import add_idle_cells
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import all_on_one_rank, per_rank, round_length, stages_per_rank
from graphpp.schedules.table.schedule import Schedule

_SEVERAL = "InterleavedZeroBubble takes several stages"


@stages_per_rank(2)
def interleaved_zero_bubble(ranks: int, stages: int, microbatches: int) -> Schedule:
    """Interleaved 1F1B with split backwards: several stages per rank, k microbatches through one before the next.

    r0 0F0 0F1 2F0 .   2F1 2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
    r1 .   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3

    Warm-up: (stages per rank - 1) k forwards, and one more for each rank that comes after. `microbatches` must be a
    multiple of max(1, microbatches // ranks). Equal to torch's `ScheduleInterleavedZeroBubble`, idle cells included:
    there a forward waits for its column and a backward does not, so a column is not always one unit of time.
    """
    chunks = per_rank("InterleavedZeroBubble", ranks, stages, microbatches)
    k = round_length("InterleavedZeroBubble", ranks, microbatches)
    steps = schedule_table(microbatches, chunks, k)

    def row(rank: int) -> list[Action | None]:
        hops = ranks - 1 - rank
        warm_up = min(len(steps), (chunks - 1) * k + hops)
        actions = _RankOrder(rank, ranks, stages, steps).row(warm_up, lag=rank)
        return [*(None,) * rank, *actions[:warm_up], *(None,) * (hops if warm_up else 0), *actions[warm_up:]]

    table = add_idle_cells([row(rank) for rank in range(ranks)], stages, waiting=(Kind.F,))
    return Schedule(table, stages, microbatches, "InterleavedZeroBubble")


def zb1p(ranks: int, stages: int, microbatches: int) -> Schedule:
    """ZB-H1: as many activations as 1F1B has on its first rank, a third of its bubble (arXiv:2401.10241, 4.1).

    r0 0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    r1 .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    r2 .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3

    Rank r warms up with ranks-1-r forwards and delays r weight gradients. With at least as many microbatches as
    ranks, unit costs give 3 microbatches + ranks - 1, and `ranks` activations at most. One stage per rank, or all on one rank.
    """
    return _one_stage_per_rank("ZB1P", 1, ranks, stages, microbatches)


def zb2p(ranks: int, stages: int, microbatches: int) -> Schedule:
    """ZB-H2: no bubble on any rank between its first action and its last (arXiv:2401.10241, 4.2).

    r0 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    r1 .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
    r2 .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    Twice ZB1P's warm-up and twice its delayed weight gradients, so up to 2 ranks - 1 activations at a time. A rank
    that starts later also ends later: free of bubbles over several steps if no rank waits for the others between
    them. One stage per rank, or all on one rank.
    """
    return _one_stage_per_rank("ZB2P", 2, ranks, stages, microbatches)


def _one_stage_per_rank(name: str, per_hop: int, ranks: int, stages: int, microbatches: int) -> Schedule:
    if all_on_one_rank(name, ranks, stages, microbatches, _SEVERAL):
        return one_after_another(_one_stage_per_rank(name, per_hop, stages, stages, microbatches))
    steps = schedule_table(microbatches, 1, microbatches)
    rows = [
        _RankOrder(rank, ranks, stages, steps).row(min(microbatches, per_hop * (ranks - 1 - rank)), lag=per_hop * rank)
        for rank in range(ranks)
    ]
    return Schedule(add_idle_cells(rows, stages, fill=True), stages, microbatches, name)


@dataclass(frozen=True)
class _RankOrder:
    """One rank and the order of its forwards, as (microbatch, chunk); backwards run through the chunks in reverse."""

    rank: int
    ranks: int
    stages: int
    steps: Sequence[tuple[int, int]]

    def row(self, warm_up: int, lag: int) -> list[Action]:
        """`warm_up` forwards; then F, I, and the W of `lag` steps ago in turn; then the remaining Ws."""
        forwards, inputs, weights = map(self._all, (Kind.F, Kind.I, Kind.W))
        row = forwards[:warm_up]
        for step, first in enumerate(inputs):
            row += forwards[warm_up + step : warm_up + step + 1]
            row.append(first)
            row += weights[step - lag : step - lag + 1] if step >= lag else []
        return row + weights[max(0, len(weights) - lag) :]

    def _all(self, kind: Kind) -> list[Action]:
        last = self.stages // self.ranks - 1
        chunks = [(microbatch, chunk if kind is Kind.F else last - chunk) for microbatch, chunk in self.steps]
        return [Action(chunk * self.ranks + self.rank, kind, microbatch) for microbatch, chunk in chunks]
