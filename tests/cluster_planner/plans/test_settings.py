"""The schedules that a search tries."""

from __future__ import annotations

import pytest

from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.cluster_planner.plans.settings import (
    SEARCHED,
    PlanSetting,
    ScheduleChoice,
    admits,
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


def test_offload_beside_a_fraction_of_recomputation_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"offload: .*got 0\.5"):
        PlanSetting(MeshShape(pp=2), 1, 4, ScheduleChoice("1F1B"), recompute=0.5, offload=0.25)
