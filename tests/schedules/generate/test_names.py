"""The named schedules equal torch's and the golden files, and accept exactly the counts that they document."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from torch.distributed.pipelining import schedules as torch_schedules

from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.names import SCHEDULES, Generator, plain_loop, stage_ids
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.schedule import Schedule
from tests.exhaustive import examples
from tests.schedules.tables import ON_A_V, admitted, named

GOLDEN = Path(__file__).parents[2] / "golden" / "schedules"
# Written from torch's own lists (Interleaved..., LoopedBFS, ZBV..., DualPipeV) or checked by eye against the papers' pictures.
GOLDEN_FILES = [
    "1F1B-1-3-3", "1F1B-2-2-3", "1F1B-4-4-2", "1F1B-4-4-8", "GPipe-1-3-2", "GPipe-3-3-3", "Interleaved1F1B-1-3-2",
    "Interleaved1F1B-2-4-4", "Interleaved1F1B-2-4-4-communication", "Interleaved1F1B-4-8-10", "Interleaved1F1B-4-8-8",
    "LoopedBFS-2-4-3", "LoopedBFS-2-4-3-communication", "LoopedBFS-3-6-4", "auto-1-3-2",
    "Combined1F1B-1-2-3", "Combined1F1B-2-4-4", "DualPipeV-2-4-4", "DualPipeV-4-8-9", "DualPipeV-2-4-4-communication",
    "ForwardOnly-2-4-4", "InterleavedZeroBubble-2-4-4", "InterleavedZeroBubble-4-8-8", "MegatronInterleaved-2-4-5",
    "V-Half-4-8-8", "V-Min-4-8-8", "V-Min-4-8-8-communication", "ZB1P-4-4-8", "ZB2P-4-4-8", "ZBVZeroBubble-2-4-4",
    "ZBVZeroBubble-4-8-3", "ZBVZeroBubble-4-8-9",
]  # fmt: skip

def same(ours: Schedule, theirs: list[list[Any]]) -> None:
    assert [[str(cell or "") for cell in row] for row in ours.table] == [
        [str(cell or "") for cell in row] for row in theirs
    ]


@pytest.mark.parametrize(("ranks", "local"), [*product([1, 2, 3, 4, 7, 8], [1, 2, 3, 5])])
def test_interleaved_equals_torch(ranks: int, local: int) -> None:
    for microbatches in (count for count in range(1, 26) if admitted(ranks, count)):
        rounds = max(1, microbatches // ranks)
        fake = SimpleNamespace(
            n_local_stages=local,
            microbatches_per_round=microbatches // rounds,
            pp_group_size=ranks,
            _n_microbatches=microbatches,
        )
        make: Any = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
        same(
            make_table("Interleaved1F1B", ranks, ranks * local, microbatches),
            [make(fake, rank) for rank in range(ranks)],
        )


@pytest.mark.parametrize(("ranks", "local", "microbatches"), [*product([1, 2, 3, 4, 8], [1, 2, 3], [1, 2, 3, 8, 11])])
def test_looped_bfs_equals_torch_but_for_the_order_of_a_stages_backwards(ranks: int, local: int, microbatches: int) -> None:
    def ascending(cell: Any) -> Any:
        backward = cell is not None and cell.computation_type.value == "B"
        return cell._replace(microbatch_index=microbatches - 1 - cell.microbatch_index) if backward else cell

    fake = SimpleNamespace(_stages=[None] * local, pp_group_size=ranks, _n_microbatches=microbatches)
    make: Any = torch_schedules.ScheduleLoopedBFS._calculate_single_rank_operations
    same(
        make_table("LoopedBFS", ranks, ranks * local, microbatches),
        [[ascending(cell) for cell in make(fake, rank)] for rank in range(ranks)],
    )


def without_idle(row: Any) -> list[str]:
    return [str(cell) for cell in row if cell is not None and "REDUCE_GRAD" not in str(cell)]


@pytest.mark.parametrize(("ranks", "microbatches"), [*product([2, 3, 4, 8], [8, 9, 16])])
@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_one_stage_a_rank_has_torch_order_but_for_the_last_rank_of_1f1b(name: str, ranks: int, microbatches: int) -> None:
    fake = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
    order: Any = getattr(torch_schedules, f"Schedule{name}")._get_pipeline_order
    theirs = [without_idle(row) for _, row in sorted(order(fake).items())]
    if name == "1F1B":
        theirs[-1] = [f"{ranks - 1}{kind}{m}" for m in range(microbatches) for kind in "FB"]
    assert [without_idle(row) for row in make_table(name, ranks, ranks, microbatches).table] == theirs


@pytest.mark.parametrize("stem", GOLDEN_FILES)
def test_golden(stem: str) -> None:
    name, *counts = stem.removesuffix("-communication").rsplit("-", 3)
    ranks, stages, microbatches = map(int, counts)
    ours = make_table(name, ranks, stages, microbatches)
    if stem.endswith("-communication"):
        ours = add_send_recv(ours)
    golden = replace(Schedule.load(GOLDEN / f"{stem}.csv"), name=ours.name)
    assert str(ours) == str(golden)
    assert ours == golden


def test_no_golden_file_is_forgotten() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.csv")) == sorted(GOLDEN_FILES)


@pytest.mark.parametrize("make", [*(make for name, make in SCHEDULES.items() if name != "auto"), plain_loop])
def test_pictures_in_the_documentation_are_true(make: Generator) -> None:
    lines = [line.strip() for line in (make.__doc__ or "").splitlines()]
    picture = Schedule.parse("\n".join(line for line in lines if line[:1] == "r" and line[1:2].isdigit()))
    assert picture == make(picture.ranks, picture.stages, picture.microbatches)


def test_one_rank_runs_each_stage_in_the_order_of_many() -> None:
    """Gradients then accumulate in the same order, and stay bit-equal, for any number of ranks."""
    for name in ("GPipe", "1F1B"):
        (row,), many = make_table(name, 1, 4, 6).table, make_table(name, 4, 4, 6).table
        for stage in range(4):
            assert [a for a in row if a and a.stage == stage] == [a for a in many[stage] if a]


@pytest.mark.parametrize("name", SCHEDULES)
def test_weight_gradients_of_a_stage_come_in_the_order_of_the_microbatches(name: str) -> None:
    """No gradient waits for one of an earlier microbatch, as docs/design.md says: the plan counts no bytes for it."""
    accepted = 0
    for ranks, local, microbatches in product([1, 2, 3, 4, 8], [1, 2, 3], [1, 2, 3, 4, 8, 9, 13, 16]):
        try:
            schedule = make_table(name, ranks, ranks * local, microbatches)
        except ScheduleError:
            continue
        accepted += 1
        for row in schedule.table:
            leaves = [leaf for action in row if action is not None for leaf in action.leaves]
            made = [(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind in (Kind.B, Kind.W)]
            for stage in {stage for stage, _ in made}:
                found = [microbatch for each, microbatch in made if each == stage]
                assert found == ([] if name == "ForwardOnly" else list(range(microbatches))), (schedule, stage)
    assert accepted >= 20


@given(named())
@settings(deadline=None, max_examples=examples(150))
def test_generated_schedules_are_accepted(schedule: Schedule) -> None:
    counts = {"ranks": schedule.ranks, "stages": schedule.stages, "microbatches": schedule.microbatches}
    check(schedule, **counts)
    with_communication = add_send_recv(schedule)
    check(with_communication, **counts)
    assert with_communication.has_communication == (schedule.ranks > 1)
    style: Any = "v" if schedule.name in ON_A_V else "loop"
    dealt = [stage_ids(rank, schedule.ranks, schedule.stages, style) for rank in range(schedule.ranks)]
    expected = {stage: rank for rank, stages in enumerate(dealt) for stage in stages}
    assert schedule.rank_of_stage == with_communication.rank_of_stage == expected


@pytest.mark.parametrize(
    ("name", "ranks", "stages", "microbatches", "fault"),
    [
        ("GPipe", 2, 4, 4, "GPipe runs one stage per rank.*Interleaved1F1B and LoopedBFS take several"),
        ("1F1B", 2, 6, 4, "1F1B runs one stage per rank: 6 stages do not fit 2 ranks, 2 stages would; Interleaved1F1B"),
        ("1F1B", 4, 2, 4, "2 stages do not fit 4 ranks, 4 stages would$"),
        ("Interleaved1F1B", 2, 5, 4, "5 do not fit 2 ranks; take 4 or 6, or another multiple of 2"),
        ("LoopedBFS", 4, 3, 4, "3 do not fit 4 ranks; take 4$"),
        ("auto", 2, 3, 4, "3 do not fit 2 ranks; take 2 or 4"),
        ("Interleaved1F1B", 4, 8, 9, "does not admit 9 microbatches.*are 8 and 10.*MegatronInterleaved takes any"),
        ("auto", 2, 4, 5, "does not admit 5 microbatches.*the nearest that fit are 4 and 6"),
        ("1F1B", 2, 2, 0, "microbatches: take a positive integer .* got 0"),
        ("auto", 1, 0, 1, "stages: take a positive integer"),
        ("LoopedBFS", 0, 0, 1, "ranks: take a positive integer .* got 0"),
    ],
)
def test_counts_that_do_not_fit(name: str, ranks: int, stages: int, microbatches: int, fault: str) -> None:
    with pytest.raises(ScheduleError, match=fault):
        make_table(name, ranks, stages, microbatches)


def test_stage_ids() -> None:
    assert [stage_ids(rank, 3, 6) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]
    assert [stage_ids(rank, 3, 6, "v") for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    assert stage_ids(0, 1, 2, "v") == stage_ids(0, 1, 2) == (0, 1)
    assert stage_ids(1, 2, 2) == (1,)


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ((2, 2, 4), "rank 2 does not exist among 2; take 0..1"),
        ((-1, 2, 4), "rank: take an integer from 0"),
        ((0, 2, 5), "5 stages cannot be dealt evenly to 2 ranks; take 4 or 6"),
        ((0, 2, 6, "v"), "2 ranks need 4, not 6"),
        ((0, 2, 2, "v"), "2 ranks need 4, not 2"),
        ((0, 2, 4, "w"), "unknown style 'w'"),
        ((0, 0, 4), "ranks: take a positive integer"),
    ],
)
def test_stage_ids_refuses(arguments: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        stage_ids(*arguments)
    assert isinstance(caught.value, ScheduleError)
