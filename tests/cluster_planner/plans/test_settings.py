"""The schedules that a search tries."""

from __future__ import annotations

import pytest

from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.settings import (
    SEARCHED,
    PlanSetting,
    ScheduleChoice,
    admits,
    schedule_choices,
    table_of,
)
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.megatron_interleaved import legal_groups


@pytest.mark.parametrize("name", SEARCHED)
def test_a_schedule_is_admitted_exactly_if_it_has_a_table(name: str) -> None:
    per_rank = {"Interleaved1F1B": 2, "LoopedBFS": 3, "InterleavedZeroBubble": 2, "MegatronInterleaved": 2}.get(name, 1)
    per_rank = 2 if name in ("ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min") else per_rank
    for ranks in (1,) if name == "auto" else (2, 3, 4):
        for microbatches in range(1, 17):
            groups = legal_groups(ranks, microbatches) if name == "MegatronInterleaved" else (None,)
            for group in groups:
                choice = ScheduleChoice(name, per_rank, group)
                found = table_of(choice, ranks, microbatches) is not None
                assert admits(choice, ranks, microbatches) == found or (group is not None and microbatches < ranks)


def test_a_group_that_the_schedule_does_not_take_is_not_admitted() -> None:
    assert not admits(ScheduleChoice("MegatronInterleaved", 2, 3), 4, 8)


def test_all_choices_take_their_numbers() -> None:
    for ranks, microbatches in ((1, 3), (2, 5), (4, 24)):
        for choice in schedule_choices(ranks, microbatches, 16):
            assert choice.table(ranks, microbatches).ranks == ranks


def test_offload_beside_a_fraction_of_recomputation_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"offload: .*got 0\.5"):
        PlanSetting(MeshShape(pp=2), 1, 4, ScheduleChoice("1F1B"), recompute=0.5, offload=0.25)


def test_a_setting_is_a_line_of_english() -> None:
    one = PlanSetting(MeshShape(dp_shard=8), 1, 1, ScheduleChoice("auto"), recompute="full", recomputed=(1,))
    assert str(one) == "pp 1 x dp_shard 8, 1 stage, loop, 1 microbatch of 1 row, recompute full of 1 layer"
    many = PlanSetting(MeshShape(pp=2), 4, 8, ScheduleChoice("ZBVZeroBubble", 2), keep=1)
    assert str(many) == "pp 2, 4 stages, ZBVZeroBubble, 8 microbatches of 4 rows, keep 1"
