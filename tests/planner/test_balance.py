"""Neighbouring segments are shared out so that the heaviest stage is as light as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpp.planner.balance import balanced
from graphpp.planner.segments import Cut


def _heaviest(seconds: Sequence[float], cut: Cut, waits: Sequence[float]) -> float:
    return max(sum(seconds[first:end]) + waits[first] for first, end in zip(cut, [*cut[1:], len(seconds)], strict=True))


@given(seconds=st.lists(st.floats(0, 10) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_lighter_heaviest_stage(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))
    share = data.draw(st.sampled_from([0.0, 0.5]))  # of the seconds before a stage, that it waits
    waits = [share * sum(seconds[:first]) for first in range(len(seconds))]
    cut = balanced(seconds, stages, waits if share else None)
    assert len(cut) == stages and cut[0] == 0 and sorted(set(cut)) == list(cut)
    every = ((0, *rest) for rest in combinations(range(1, len(seconds)), stages - 1))
    assert _heaviest(seconds, cut, waits) <= min(_heaviest(seconds, each, waits) for each in every) * (1 + 2e-6) + 1e-12


@pytest.mark.parametrize("stages", [1, 3])
def test_segments_without_work_are_shared_out_too(stages: int) -> None:
    assert len(balanced([0.0, 0.0, 0.0], stages)) == stages
