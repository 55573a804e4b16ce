"""Megatron-Core's interleaved schedule: its helper functions, with the same results, and the schedules made with them.

Megatron numbers a rank's stages as *chunks* 0, 1, ...; chunk c of rank r is stage c ranks + r. A rank runs `group` microbatches
through one chunk before the next chunk (`microbatch_group_size_per_vp_stage`). An *order* is one rank's list of signed chunk
numbers from 1: +c is a forward, -c a backward. With separate weight gradients, -c is the input gradients of the chunk and -c -
0.5 its weight gradients. Results equal those of megatron-core 0.16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest

from graphpp.arguments import COUNT, INDEX, NUMBER, Accepted, checked, or_none
from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.rewrite.add_idle_cells import add_idle_cells
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.placement import check_counts, per_rank, stages_per_rank
from graphpp.schedules.table.schedule import SCHEDULE, Row, Schedule

_SHOWN = 8  # legal groups that a message names
Steps = list[tuple[int, int]]


_ORDERS = Accepted(
    "a list of numbers for each rank",
    lambda value: isinstance(value, list | tuple)
    and all(isinstance(order, list | tuple) and all(map(NUMBER.accepts, order)) for order in value),
)
_STEPS = Accepted(
    "a list of (microbatch, chunk)",
    lambda value: isinstance(value, list | tuple)
    and all(isinstance(step, list | tuple) and len(step) == 2 and all(map(INDEX.accepts, step)) for step in value),
)


@checked(ScheduleError, microbatches=COUNT, chunks=COUNT, group=COUNT)
def schedule_table(microbatches: int, chunks: int, group: int) -> Steps:
    """The forwards of a rank as (microbatch, chunk), Megatron's `get_schedule_table`. Raises `ScheduleError` for `group` < 1.

    `schedule_table(5, 2, 3)`: (0,0) (1,0) (2,0) (0,1) (1,1) (2,1), (3,0) (4,0) (3,1) (4,1).
    """
    check_counts(1, chunks, microbatches)
    if group < 1:
        raise ScheduleError(f"a group has at least one microbatch, got group={group}")
    starts = range(0, microbatches, group)
    groups = [range(start, min(start + group, microbatches)) for start in starts]
    return [(microbatch, chunk) for members in groups for chunk in range(chunks) for microbatch in members]


@checked(ScheduleError, microbatches=COUNT, chunks=COUNT, group=or_none(COUNT), ranks=COUNT, rank=INDEX)
def rank_microbatches(microbatches: int, chunks: int, group: int | None, ranks: int, rank: int) -> tuple[int, bool, int, int]:
    """The forwards of a rank: (in total, whether all are warm-up, in the warm-up, after the warm-up).

    With one chunk (no virtual pipeline) the warm-up has one forward for each later rank, and `group` is unused. With several
    chunks it has two for each later rank, and (chunks - 1) groups: for 4 ranks, 2 chunks, 8 microbatches in groups of 4: 10, 8,
    6, 4 of 16. Megatron's `get_pp_rank_microbatches`. Raises `ScheduleError` for a rank that does not exist.
    """
    if not 0 <= rank < ranks:
        raise ScheduleError(f"rank {rank} does not exist among {ranks}; take 0..{ranks - 1}")
    total, hops = microbatches * chunks, ranks - 1 - rank
    if ranks == 1:
        warm_up = 0
    elif chunks == 1:
        warm_up = hops
    else:
        warm_up = 2 * hops + (chunks - 1) * (group or ranks)
    return total, warm_up >= total, min(warm_up, total), max(0, total - warm_up)


@checked(ScheduleError, warm_up=INDEX, chunks=COUNT, table=_STEPS)
def table_to_order(warm_up: int, chunks: int, table: Sequence[tuple[int, int]]) -> list[int]:
    """A rank's order: `warm_up` forwards, then forward and backward in turn (Megatron's `convert_schedule_table_to_order`)."""
    forwards = [chunk + 1 for _, chunk in table]
    backwards = [chunk - chunks for _, chunk in table]
    pairs = zip_longest(forwards[warm_up:], backwards, fillvalue=0)
    return forwards[:warm_up] + [step for pair in pairs for step in pair if step]


@checked(ScheduleError, microbatch=INDEX, warm_up=INDEX, n=INDEX)
def is_recomputed(microbatch: int, warm_up: int, n: int) -> bool:
    """Whether a microbatch is fully recomputed under `num_microbatches_with_partial_activation_checkpoints=n`.

    In each window of `warm_up` + 1 microbatches, as many as are alive at once, all but the first n are recomputed. `microbatch`
    counts a rank's forwards over all chunks (Korthikanti et al. 2022, arXiv:2205.05198, appendix C).
    """
    return microbatch % (warm_up + 1) >= n


@checked(ScheduleError, schedule=SCHEDULE, n=INDEX)
def recompute_partially(schedule: Schedule, n: int) -> Schedule:
    """The schedule with `recomputed` set by `is_recomputed`: on each rank, in every window of forwards all but the first n.

    A window has as many forwards as the rank runs before its first backward. 1F1B on 2 ranks, 4 microbatches, n = 1: rank 0
    (windows of 2) recomputes microbatches 1 and 3; rank 1 (windows of 1) recomputes none.
    """
    pairs = set()
    for row in schedule.table:
        leaves = [leaf for action in row if action for leaf in action.leaves]
        first = next((at for at, leaf in enumerate(leaves) if leaf.kind in (Kind.B, Kind.I)), len(leaves))
        window = sum(leaf.kind is Kind.F for leaf in leaves[:first])
        forwards = [leaf for leaf in leaves if leaf.kind is Kind.F]
        pairs |= {(leaf.stage, leaf.microbatch or 0) for at, leaf in enumerate(forwards) if is_recomputed(at, window - 1, n)}
    return replace(schedule, recomputed=frozenset(pairs))


@stages_per_rank(2)
@checked(ScheduleError, group=or_none(COUNT))
def megatron_interleaved(ranks: int, stages: int, microbatches: int, *, group: int | None = None) -> Schedule:
    """Interleaved 1F1B with any `microbatch_group_size_per_vp_stage`: `group` microbatches through a chunk at a time.

    r0 0F0 0F1 0F2 2F0 2F1 2F2 2B0 0F3 2B1 0F4 2B2 2F3 0B0 2F4 0B1 .   0B2 .   2B3 2B4 0B3 0B4
    r1 .   1F0 1F1 1F2 3F0 3B0 3F1 3B1 3F2 3B2 1F3 1B0 1F4 1B1 3F3 1B2 3F4 3B3 3B4 1B3 1B4

    Above: 5 microbatches in groups of 3. Every group has at least `ranks` microbatches, or all of them; None takes the
    smallest such group. With one stage per rank the result is 1F1B.
    """
    chunks = per_rank("MegatronInterleaved", ranks, stages, microbatches)
    group = least_group("MegatronInterleaved", ranks, microbatches, group)
    steps = schedule_table(microbatches, chunks, group)
    warm_ups = [rank_microbatches(microbatches, chunks, group, ranks, rank)[2] for rank in range(ranks)]
    if ranks == 1:  # no schedule in Megatron; all forwards of a microbatch must run before its first backward
        warm_ups = [(chunks - 1) * group]
    orders = [table_to_order(warm_up, chunks, steps) for warm_up in warm_ups]
    table = add_idle_cells([_row(rank, ranks, order) for rank, order in enumerate(orders)], stages)
    return Schedule(table, stages, microbatches, "MegatronInterleaved")


@stages_per_rank(2, alone=1)
def combined_1f1b(ranks: int, stages: int, microbatches: int, *, group: int | None = None) -> Schedule:
    """1F1B in which the forward of one microbatch overlaps with the backward of another, and each hides the other's waits.

    r0 0F0 (0F1;0B0)OVERLAP_F_B (0F2;0B1)OVERLAP_F_B 0B2

    The expert all-to-all of one part runs under the attention and the MLP of the other (Megatron-Core,
    `overlap_moe_expert_parallel_comm`). With several stages on one rank, the forward goes down while the backward
    goes up. On several ranks this is Megatron's interleaved 1F1B with one more forward in the warm-up: with the usual one the
    first pair on the last rank would be the forward and the backward of one microbatch. `group` as in `megatron_interleaved`.
    """
    chunks = per_rank("Combined1F1B", ranks, stages, microbatches)
    if ranks == 1:
        steps, warm_ups = schedule_table(microbatches, chunks, 1), [chunks]
    else:
        size = least_group("Combined1F1B", ranks, microbatches, group)
        steps = schedule_table(microbatches, chunks, size)
        warm_ups = [min(len(steps), 2 * (ranks - rank) - 1 + (chunks - 1) * size) for rank in range(ranks)]

    def row(rank: int, warm_up: int) -> list[Action]:
        forwards = [Action(chunk * ranks + rank, Kind.F, microbatch) for microbatch, chunk in steps]
        backwards = [Action((chunks - 1 - chunk) * ranks + rank, Kind.B, microbatch) for microbatch, chunk in steps]
        overlaps = [Action(-1, Kind.OVERLAP_F_B, None, parts) for parts in zip(forwards[warm_up:], backwards, strict=False)]
        return [*forwards[:warm_up], *overlaps, *backwards[len(overlaps) :]]

    table = add_idle_cells([row(rank, warm_up) for rank, warm_up in enumerate(warm_ups)], stages)
    return Schedule(table, stages, microbatches, "Combined1F1B")


def forward_only(ranks: int, stages: int, microbatches: int) -> Schedule:
    """The table of evaluation: forwards in rounds of `ranks` microbatches, each round through all of a rank's stages.

    r0 0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3
    r1 .   1F0 1F1 3F0 3F1 1F2 1F3 3F2 3F3

    Any number of stages per rank, placed in a loop; the order of Megatron-Core's schedule with `forward_only`.
    """
    chunks = per_rank("ForwardOnly", ranks, stages, microbatches)
    steps = schedule_table(microbatches, chunks, ranks)
    rows = [[Action(chunk * ranks + rank, Kind.F, m) for m, chunk in steps] for rank in range(ranks)]
    return Schedule(add_idle_cells(rows, stages), stages, microbatches, "ForwardOnly")


@checked(ScheduleError, orders=_ORDERS)
def from_orders(orders: Sequence[Sequence[float]], *, name: str = "Megatron order") -> Schedule:
    """The schedule of one order per rank, with idle cells: a chunk's n-th forward or backward belongs to microbatch n.

    All ranks have the same chunks. If a chunk c has -c - 0.5 (W), -c is an I, otherwise a B. Raises `ScheduleError` for a
    number that is no chunk, and for orders that deadlock or omit a forward or backward.
    """
    chunks = max((int(abs(step)) for order in orders for step in order), default=0)
    rows = [_row(rank, len(orders), order) for rank, order in enumerate(orders)]
    microbatches = 1 + max((action.microbatch or 0 for row in rows for action in row if action), default=-1)
    stages = chunks * len(orders)
    made = Schedule(tuple(map(tuple, rows)), stages, microbatches, name)
    check(made, ranks=len(orders), stages=stages, microbatches=microbatches)
    return replace(made, table=add_idle_cells(rows, stages))


def _row(rank: int, ranks: int, order: Sequence[float]) -> Row:
    split = {int(-step) for step in order if step < 0 and step % 1}
    seen: Counter[float] = Counter()
    row: list[Action] = []
    for step in order:
        if abs(step) < 1 or (step != int(step) and (step > 0 or step % 1 != 0.5)):
            raise ScheduleError(f"rank {rank}: {step} is no step; write +c, -c, or -c - 0.5 for chunk c from 1 on")
        chunk = int(abs(step))
        kind = Kind.F if step > 0 else Kind.W if step % 1 else Kind.I if chunk in split else Kind.B
        row.append(Action((chunk - 1) * ranks + rank, kind, seen[step]))
        seen[step] += 1
    return tuple(row)


def legal_groups(ranks: int, microbatches: int) -> list[int]:
    """The group sizes that the schedule admits, ascending."""
    least = min(ranks, microbatches)
    return [size for size in range(least, microbatches + 1) if microbatches % size == 0 or microbatches % size >= least]


def least_group(name: str, ranks: int, microbatches: int, group: int | None) -> int:
    """`group`, or the smallest legal one for None. Raises `ScheduleError` if `group` is not legal.

    The conditions are Megatron's, except that fewer microbatches than ranks form one group.
    """
    least, legal = min(ranks, microbatches), legal_groups(ranks, microbatches)
    if group is not None and group not in legal:
        named = ", ".join([*map(str, legal[:_SHOWN]), *([".."] if len(legal) > _SHOWN else [])])
        raise ScheduleError(
            f"{name} on {ranks} ranks does not admit groups of {group} of {microbatches} microbatches: each group, and "
            f"the rest at the end, has at least {least}; groups of {named} fit"
        )
    return legal[0] if group is None else group
