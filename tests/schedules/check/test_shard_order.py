"""Parameters are unsharded where they are read, gradients reduced once: torch's tables pass, faulty ones are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.table.schedule import Schedule


def torch_tables(name: str, ranks: int, stages: int, microbatches: int) -> list[list[Any]]:
    if not name.startswith("Schedule"):
        rows = make_table(name, ranks, stages, microbatches).table
        return [[torch_schedules._Action.from_str(str(action)) for action in row if action] for row in rows]
    fake = SimpleNamespace(
        pp_group_size=ranks, num_stages=stages, _n_microbatches=microbatches, n_local_stages=stages // ranks
    )
    make: Any = getattr(torch_schedules, name)._calculate_single_rank_operations
    return [make(fake, rank) for rank in range(ranks)]


@pytest.mark.parametrize("with_messages", [False, True])
@pytest.mark.parametrize("most", [2, 3, 5])
@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "LoopedBFS", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"])
def test_what_torch_adds_is_accepted(name: str, most: int, with_messages: bool) -> None:
    ranks, microbatches = 3, 6
    stages = ranks if name == "1F1B" else 2 * ranks if name.startswith("Schedule") else 4 * ranks
    rows = torch_tables(name, ranks, stages, microbatches)
    sharded = [torch_schedules._add_unshard_reshard(row, max_active_stages=most) for row in rows]
    lists: Any = {rank: torch_schedules._add_reduce_grad(row, microbatches) for rank, row in enumerate(sharded)}
    if with_messages:
        rank_of = Schedule.of(rows).rank_of_stage
        lists = torch_schedules._add_send_recv(lists, rank_of.__getitem__, stages)
    # `Schedule.load` drops the WAIT cells of torch 2.15.
    texts = [[str(action) for action in lists[rank] if "WAIT_" not in str(action)] for rank in range(ranks)]
    assert sum("UNSHARD" in text for row in texts for text in row) >= stages
    assert sum("REDUCE_GRAD" in text for row in texts for text in row) == stages
    check(Schedule.of(texts), ranks=ranks, stages=stages, microbatches=microbatches)


@pytest.mark.parametrize(
    "row",
    [
        "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0RESHARD",
        "0UNSHARD 0F0 0B0 0REDUCE_GRAD 0RESHARD",
        "0UNSHARD 0F0 0I0 0W0 0RESHARD 0REDUCE_GRAD",
        "0UNSHARD 0RESHARD . 0UNSHARD 0F0 . 0B0 0RESHARD",
    ],
)
def test_accepted(row: str) -> None:
    check(Schedule.of([row]), ranks=1, stages=1, microbatches=1)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("0F0 0UNSHARD 0B0 0RESHARD", "column 0: 0F0 needs the parameters of stage 0, which are sharded here; add 0UNSHARD"),
        ("0UNSHARD 0F0 0RESHARD 0B0", "column 3: 0B0 needs the parameters of stage 0"),
        ("0UNSHARD 0F0 0I0 0RESHARD 0W0", "column 4: 0W0 needs the parameters of stage 0"),
        ("0UNSHARD 0F0 0B0", "column 0: stage 0 is never resharded after this"),
        ("0F0 0B0 0RESHARD", "column 0: 0F0 needs the parameters of stage 0"),
        ("0RESHARD 0UNSHARD 0F0 0B0", "column 0: 0RESHARD: stage 0 is not unsharded here"),
        ("0UNSHARD 0UNSHARD 0F0 0B0 0RESHARD", "column 1: 0UNSHARD: stage 0 is unsharded since column 0"),
        ("0UNSHARD 0F0 0B0 0RESHARD 0RESHARD", "column 4: 0RESHARD: stage 0 is not unsharded here"),
        ("0F0 0REDUCE_GRAD 0B0", "column 1: 0REDUCE_GRAD needs 0B0, which stands in column 2"),
        ("0F0 0I0 0REDUCE_GRAD 0W0", "column 2: 0REDUCE_GRAD needs 0W0"),
        ("0F0 0B0 0REDUCE_GRAD 0REDUCE_GRAD", "column 3: 0REDUCE_GRAD stands in column 2 already"),
        ("0F0 0B0 1REDUCE_GRAD", "there is no stage 1"),
    ],
)
def test_refused(row: str, fault: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        check(Schedule.of([row], stages=1), ranks=1, stages=1, microbatches=1)
    assert fault in str(caught.value)


def test_what_is_left_out_is_reduced_at_the_end_of_the_step() -> None:
    check(Schedule.of(["0F0 0B0 0REDUCE_GRAD", "1F0 1B0"]), ranks=2, stages=2, microbatches=1)


def test_a_part_of_an_overlap_reads_its_stage_too() -> None:
    rows = ["0UNSHARD 0F0 0RESHARD (0F1;0B0)OVERLAP_F_B 0B1"]
    with pytest.raises(ScheduleError, match="column 3: 0F1 needs the parameters of stage 0"):
        check(Schedule.of(rows), ranks=1, stages=1, microbatches=2)
