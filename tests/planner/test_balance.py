"""Neighbouring segments are shared out so that the heaviest stage is as light as can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphpp.planner.balance import balanced, balanced_on
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


_SECONDS = st.lists(st.floats(0, 10) | st.sampled_from([0.0, 1.0]), min_size=7, max_size=7)


@given(kinds=st.lists(st.integers(0, 2), min_size=1, max_size=7), seconds=st.tuples(*[_SECONDS] * 3), data=st.data())
def test_no_cut_for_unlike_devices_has_a_lighter_heaviest_stage(
    kinds: list[int], seconds: tuple[list[float], ...], data: st.DataObject
) -> None:
    """`held`: shares of a memory, under which there may be no cut at all."""
    shares = st.lists(st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.5]), min_size=7, max_size=7)
    held = data.draw(st.none() | st.lists(shares, min_size=len(kinds), max_size=len(kinds)))

    def heaviest(cut: Sequence[int]) -> float:
        """The seconds of the heaviest stage; infinite if one is over its memory."""
        stages = [slice(*each) for each in pairwise((*cut, 7))]
        full = held is not None and any(sum(own[stage]) > 1 for own, stage in zip(held, stages, strict=True))
        return inf if full else max(sum(seconds[kind][stage]) for kind, stage in zip(kinds, stages, strict=True))

    least = min(heaviest((0, *rest)) for rest in combinations(range(1, 7), len(kinds) - 1))
    cut = balanced_on(seconds, kinds, held)
    assert (cut is None) == (least == inf)
    if cut is not None:
        assert len(cut) == len(kinds) and cut[0] == 0 and sorted(set(cut)) == list(cut)
        assert heaviest(cut) <= least * (1 + 2e-6) + 1e-12


def test_a_slow_stage_leaves_a_segment_that_is_too_long_for_it_to_a_fast_one() -> None:
    fast, slow = [1.0, 6.0, 1.0, 1.0, 1.0], [3.0, 18.0, 3.0, 3.0, 3.0]
    assert balanced_on([fast, slow], [0, 1, 0]) == (0, 2, 3)


@pytest.mark.parametrize("stages", [1, 3])
def test_segments_without_work_are_shared_out_too(stages: int) -> None:
    assert len(balanced([0.0, 0.0, 0.0], stages)) == stages
