"""V-Half and V-Min: never more activations than their limits, and as short as the authors' own tables."""

from __future__ import annotations

import pytest

from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.generate.v_half_v_min import V_HALF, V_MIN, Block
from tests.schedules.replay import replayed

# (makespan, peak in a rank's microbatches) of the authors' generator at unit costs.
BARS = {
    "V-Half": {
        (1, 3): (9, 1), (2, 1): (5, 1), (2, 4): (12.5, 2), (3, 6): (20.5, 2), (4, 1): (9, 1), (4, 8): (26.5, 3),
        (4, 16): (50.5, 3), (5, 10): (35.5, 3), (6, 6): (24, 4), (6, 18): (59.5, 4), (7, 14): (50.5, 4),
        (8, 2): (19, 2), (8, 8): (32.5, 5), (8, 16): (56.5, 5), (8, 24): (80.5, 5), (9, 18): (65.5, 5),
        (12, 24): (86.5, 7), (16, 32): (116.5, 9),
    },
    "V-Min": {
        (1, 3): (9, 1), (2, 1): (4.5, 1), (2, 4): (13.5, 2), (3, 6): (20.5, 2), (4, 1): (8.5, 1), (4, 8): (29.5, 2),
        (4, 16): (53.5, 2), (5, 10): (37.5, 3), (6, 6): (26.5, 3), (6, 18): (62.5, 3), (7, 14): (53.5, 3),
        (8, 2): (19, 2), (8, 8): (37.5, 4), (8, 16): (61.5, 4), (8, 24): (85.5, 4), (9, 18): (68.5, 4),
        (12, 24): (92.5, 5), (16, 32): (125.5, 6),
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "counts"), [(name, counts) for name, bars in BARS.items() for counts in bars])
def test_as_short_and_small_as_the_authors_tables(name: str, counts: tuple[int, int]) -> None:
    ranks, microbatches = counts
    makespan, peak = replayed(make_table(name, ranks, 2 * ranks, microbatches))
    bar = BARS[name][counts]
    assert makespan <= bar[0]
    assert peak <= bar[1]


@pytest.mark.parametrize("ranks", range(1, 8))
@pytest.mark.parametrize("block", [V_HALF, V_MIN], ids=["half", "min"])
def test_any_number_of_microbatches_stays_below_the_limit(block: Block, ranks: int) -> None:
    for microbatches in (1, 2, 3, ranks, 2 * ranks + 1):
        schedule = make_table(block.name, ranks, 2 * ranks, microbatches)
        check(schedule, ranks=ranks, stages=2 * ranks, microbatches=microbatches)
        makespan, peak = replayed(schedule)
        assert 2 * peak <= block.limit(ranks)
        assert max(map(len, schedule.table)) == 2 * makespan  # a column is the time of one stage
        assert schedule.rank_of_stage[2 * ranks - 1] == 0
