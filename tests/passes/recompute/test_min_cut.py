"""`solve` and `pareto_front` find the same choices as trying all choices one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise, product

import pytest

from graphpp.passes.recompute.min_cut import CutProblem, CutSolution, pareto_front, solve

SIZE = 6


def drawn(seed: int) -> CutProblem:
    """A random problem: some values cannot be kept, others cannot be recomputed, and every value can be one of the two."""
    choose = random.Random(seed)
    kinds = [choose.choice(["both", "both", "kept", "again"]) for _ in range(SIZE)]
    kinds[0] = "kept"
    read = [choose.random() < 0.5 for _ in kinds]
    return CutProblem(
        tuple(None if kind == "again" else choose.randint(0, 9) for kind in kinds),
        tuple(None if kind == "kept" else choose.randint(0, 9) for kind in kinds),
        tuple(
            () if kind == "kept" else tuple(source for source in range(value) if choose.random() < 0.4)
            for value, kind in enumerate(kinds)
        ),
        tuple(read),
    )


def every_choice(shape: CutProblem) -> Iterator[CutSolution]:
    """All valid choices: each value is kept, recomputed or absent, and every value that is read is available."""
    for states in product(("kept", "again", "none"), repeat=len(shape.read)):
        there = [state != "none" for state in states]
        possible = all(
            not (state == "kept" and shape.nbytes[value] is None)
            and not (state == "again" and (shape.costs[value] is None or not all(there[s] for s in shape.inputs[value])))
            and (there[value] or not shape.read[value])
            for value, state in enumerate(states)
        )
        if possible:
            again = tuple(state == "again" for state in states)
            kept = sum(shape.nbytes[value] or 0 for value, state in enumerate(states) if state == "kept")
            yield CutSolution(again, kept, sum(shape.costs[value] or 0 for value, flag in enumerate(again) if flag))


@pytest.mark.parametrize("seed", range(15))
def test_no_choice_is_cheaper(seed: int) -> None:
    shape = drawn(seed)
    choices = set(every_choice(shape))
    for byte_price, cost_price in ((1, 1), (3, 1), (1, 4), (1, 1000), (1000, 1)):
        found = solve(shape, byte_price, cost_price)
        assert found in choices
        least = min(choice.nbytes * byte_price + choice.cost * cost_price for choice in choices)
        assert found.nbytes * byte_price + found.cost * cost_price == least


@pytest.mark.parametrize("seed", range(15))
def test_the_front_has_every_choice_that_is_best_at_some_price(seed: int) -> None:
    shape = drawn(seed)
    points = {(choice.nbytes, choice.cost) for choice in every_choice(shape)}
    found = [(choice.nbytes, choice.cost) for choice in pareto_front(shape)]
    assert set(found) <= points and found == sorted(found, key=lambda point: -point[0])
    rates = [(after[1] - before[1]) / (before[0] - after[0]) for before, after in pairwise(found)]
    assert rates == sorted(rates)
    for byte_price in (0.01, 0.3, 0.5, 1, 1.7, 2, 3, 5, 100):
        best = min(nbytes * byte_price + cost for nbytes, cost in points)
        assert min(nbytes * byte_price + cost for nbytes, cost in found) == pytest.approx(best)


def test_of_equal_choices_the_one_that_computes_least() -> None:
    shape = CutProblem((4, 4), (None, 0), ((), (0,)), (False, True))  # keep the value, or the value that it copies
    assert solve(shape, 1, 1).recomputed == (False, False)
