"""Seeded combinations of model, mesh, schedule and options on 1, 2 and 4 ranks train as one process does, or are refused.

Four combinations by default; under `GRAPHPP_FUZZ=2000` 1,000. A failure is shrunk and printed as Python, which
`GRAPHPP_FUZZ_SHRINK=0` leaves out: `outcome(combination(seed))`, or `outcome(Combination(...))` as printed.
"""

from __future__ import annotations

import os

import pytest

from tests.exhaustive import PROGRAMS
from tests.fuzz.combinations import combination
from tests.fuzz.combined import outcome, shrunk

BLOCK = 25
FIRST = 1000 * int(os.environ.get("GRAPHPP_FUZZ_SEED", "0"))
SEEDS = range(1, 5) if PROGRAMS < 2 * BLOCK else range(FIRST, FIRST + PROGRAMS // 2)  # seed 0 alone takes 80 CPU seconds
SHRINK = os.environ.get("GRAPHPP_FUZZ_SHRINK", "1") != "0"


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("first", range(SEEDS.start, SEEDS.stop, BLOCK))
def test_combinations_train_as_one_process(first: int) -> None:
    for seed in range(first, min(first + BLOCK, SEEDS.stop)):
        case = combination(seed)
        found = outcome(case)
        if found.outcome not in ("right", "refused"):
            small = shrunk(case, found.outcome) if SHRINK else case
            pytest.fail(f"{found.outcome}: combination({seed})\n{small}\n{outcome(small).text or found.text}")
