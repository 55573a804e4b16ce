"""The zero-bubble schedules: equal to torch's where torch has them, with the makespans and memory of their papers."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.replay import idle, replayed
from tests.schedules.tables import admitted


def torch_table(name: str, ranks: int, local: int, microbatches: int) -> list[list[str]]:
    """The rows of torch's class, "" for idle."""
    cls: Any = getattr(torch_schedules, f"Schedule{name}")
    fake = SimpleNamespace(
        n_local_stages=local,
        num_stages=ranks * local,
        microbatches_per_round=microbatches // max(1, microbatches // ranks),
        pp_group_size=ranks,
        _n_microbatches=microbatches,
    )
    rows = {rank: cls._calculate_single_rank_operations(fake, rank) for rank in range(ranks)}
    if name == "InterleavedZeroBubble":
        fake.pipeline_order = rows
        rows = cls._add_bubbles_to_actions(fake, ranks * local)
    return [[str(cell or "") for cell in rows[rank]] for rank in range(ranks)]


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(cell or "") for cell in row] for row in schedule.table]


@pytest.mark.parametrize(("ranks", "local"), [*product([1, 2, 3, 4, 8], [1, 2, 3])])
def test_interleaved_equals_torch(ranks: int, local: int) -> None:
    for microbatches in (count for count in range(1, 2 * ranks + 10) if admitted(ranks, count)):
        ours = make_table("InterleavedZeroBubble", ranks, ranks * local, microbatches)
        assert texts(ours) == torch_table("InterleavedZeroBubble", ranks, local, microbatches)


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "DualPipeV"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
def test_v_equals_torch(name: str, ranks: int) -> None:
    for microbatches in range(2 * ranks if name == "DualPipeV" else 1, 2 * ranks + 10):
        assert texts(make_table(name, ranks, 2 * ranks, microbatches)) == torch_table(name, ranks, 2, microbatches)


@pytest.mark.parametrize(("ranks", "more"), [*product([1, 2, 3, 5, 8], [0, 1, 7])])
def test_zb_h1_and_h2_are_what_their_names_promise(ranks: int, more: int) -> None:
    """The last rank starts after ranks - 1 units and never waits after that; under H2 no rank waits at all."""
    microbatches = 2 * ranks + more
    for name, peak in (("ZB1P", ranks), ("ZB2P", 2 * ranks - 1)):
        schedule = make_table(name, ranks, ranks, microbatches)
        assert replayed(schedule) == (3 * microbatches + ranks - 1, peak)
    assert [idle(make_table("ZB2P", ranks, ranks, microbatches), rank) for rank in range(ranks)] == [0.0] * ranks
    assert idle(make_table("ZB1P", ranks, ranks, microbatches), 0) == ranks - 1
    assert replayed(make_table("1F1B", ranks, ranks, microbatches))[0] == 3 * (microbatches + ranks - 1)


@pytest.mark.parametrize("alias", [("ZB-H1", "ZB1P"), ("zb-h2", "ZB2P")])
def test_aliases(alias: tuple[str, str]) -> None:
    assert make_table(alias[0], 3, 3, 5) == make_table(alias[1], 3, 3, 5)
    assert make_table(alias[0], 3, 3, 5).name == alias[1]


@pytest.mark.parametrize(
    ("name", "counts", "fault"),
    [
        ("ZB1P", (2, 4, 4), "ZB1P runs one stage per rank.*; InterleavedZeroBubble takes several stages per rank"),
        ("ZB2P", (4, 2, 4), "2 stages do not fit 4 ranks, 4 stages would$"),
        ("InterleavedZeroBubble", (2, 3, 4), "3 do not fit 2 ranks; take 2 or 4"),
        ("InterleavedZeroBubble", (2, 4, 5), "InterleavedZeroBubble on 2 ranks does not admit 5 microbatches"),
        ("ZBVZeroBubble", (2, 2, 4), "rank r having stages r and 3 - r: 2 stages do not fit 2 ranks, 4 stages would"),
        ("V-Half", (2, 6, 4), "V-Half runs two stages per rank.*4 stages would"),
        ("DualPipeV", (4, 8, 7), "7 do not fill 8 stages on 4 ranks; take 8 or more, or ZBVZeroBubble"),
        ("V-Min", (2, 4, 0), "microbatches: take a positive integer .* got 0"),
    ],
)
def test_counts_that_do_not_fit(name: str, counts: tuple[int, int, int], fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        make_table(name, *counts)
