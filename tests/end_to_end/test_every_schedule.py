"""Schedules with a split backward: losses, gradients, norms and parameters of three steps equal a plain loop's, bit for bit.

The model has what breaks zero bubble in torch: a weight used twice in one stage with another between, a frozen first
stage, recomputed blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import graphpp
from graphpp.schedules.generate.read import default_stages
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.training import CASES, Counting, capturing, compiled, differences, eager, step, trained

MICROBATCHES = 8
LAYERS = 8
SCHEDULES = (
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ZB1P", "ZB2P"),
    *("V-Half", "V-Min", "MegatronInterleaved", "Combined1F1B"),
)
# `make test` proves the others as tables (tests/schedules); 1F1B and Interleaved1F1B train in test_numbers.py.
ON_RANKS = ("ZBVZeroBubble", "DualPipeV")


def options(schedule: str, ranks: int, recompute: Any = None) -> dict[str, Any]:
    stages = default_stages(schedule, ranks)
    split = [f"layers.{stage * LAYERS // stages}" for stage in range(1, stages)]
    return {"split": split, "schedule": schedule, "microbatches": MICROBATCHES, "memory": recompute}


@pytest.mark.parametrize("schedule", [*ON_RANKS, *further(*(name for name in SCHEDULES if name not in ON_RANKS))])
@pytest.mark.parametrize("ranks", [2, *further(4)])
def test_every_schedule_equals_the_plain_loop(ranks: int, schedule: str) -> None:
    assert differences(trained(ranks, "deep", **options(schedule, ranks)), eager("deep", MICROBATCHES)) == []


RECOMPUTED = graphpp.Recompute(weight_grad=True)


@pytest.mark.nccl
@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        ("deep, 5 frozen", "ZBVZeroBubble", RECOMPUTED),
        ("deep", "DualPipeV", "full"),
        *further(*(("deep, 2 frozen", name, None) for name in ("InterleavedZeroBubble", "ZB1P", "ZBVZeroBubble", "DualPipeV"))),
        *further(*(("deep", name, "full") for name in ("InterleavedZeroBubble", "ZB1P", "ZBVZeroBubble"))),
    ],
)
def test_frozen_stages_and_recomputed_blocks_under_zero_bubble(name: str, schedule: str, recompute: Any) -> None:
    """torch: the stage after a frozen first one gets no gradients, without a word; checkpointed blocks run K + 2 times."""
    assert differences(trained(2, name, **options(schedule, 2, recompute)), eager(name, MICROBATCHES)) == []


def count(rank: int, schedule: str, recompute: Any) -> Counter[str]:
    with capturing("deep"):
        case = CASES["deep"]()
        pipe = compiled(case, **options(schedule, 2, recompute))
        step(pipe, case.batch)
        with Counting() as counting:
            step(pipe, case.batch)
    return counting.calls


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", *further("InterleavedZeroBubble")])
def test_a_recomputed_block_runs_forward_twice(schedule: str) -> None:
    once, again = (sum(run_ranks(count, 2, schedule, recompute), Counter()) for recompute in (None, "full"))
    assert once["aten.silu"] == LAYERS * MICROBATCHES
    assert again["aten.silu"] == 2 * LAYERS * MICROBATCHES
    assert again["aten.silu_backward"] == once["aten.silu_backward"] == LAYERS * MICROBATCHES
    linears = again["aten.addmm"] - once["aten.addmm"]
    assert 0 < linears <= 3 * LAYERS * MICROBATCHES  # each of a block's three once more, at most
    assert again["aten.mm"] == once["aten.mm"]  # the gradients' products are none of them doubled
