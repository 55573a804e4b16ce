"""Results that differ are compared with runs of other decisions: one run after the other, until one excuses each of them."""

from collections.abc import Iterator

import pytest
import torch

from graphpp.verification.runs import Numbers
from graphpp.verification.tolerances import Tolerances, compared

TOLERANCE = 1e-6


def step_with(**grads: float) -> Numbers:
    """The results of a step: a loss, and gradients of these sizes."""
    return Numbers([torch.tensor(1.0)], {name: torch.full((2,), size) for name, size in grads.items()})


REFERENCE = step_with(a=1.0, b=1.0)
OTHERS = [step_with(a=1.02, b=1.0), step_with(a=1.0, b=0.97), step_with(a=1.1, b=1.1)]


@pytest.mark.parametrize(
    ("ours", "wrong", "runs"),
    [
        (step_with(a=1.0, b=1.0 + 5e-7), set(), 0),
        (step_with(a=1.02, b=1.0), set(), 1),
        (step_with(a=1.02, b=0.97), set(), 2),  # each result is that of one run
        (step_with(a=1.01, b=0.97), {"a"}, 3),  # between two runs, so that of none
        (step_with(a=1.02, b=1.6), {"a", "b"}, 0),  # off by more than decisions can explain
        (step_with(a=1.02), {"a", "b"}, 0),  # a gradient is missing
        (step_with(a=float("nan"), b=0.97), {"a", "b"}, 0),
    ],
)
def test_other_decisions_excuse_their_own_results_alone(ours: Numbers, wrong: set[str], runs: int) -> None:
    made: list[Numbers] = []

    def others() -> Iterator[Numbers]:
        for each in OTHERS:
            made.append(each)
            yield each

    found = compared("", ours, REFERENCE, Tolerances(TOLERANCE, note="rounded otherwise", decisions=others()))
    assert {name for name, each in found.largest.items() if each.verdict == "differs"} == wrong
    assert len(made) == runs
    assert found.note.startswith("rounded otherwise") and ("decisions" in found.note) == (runs > 0)
    plain = compared("", ours, REFERENCE, Tolerances(TOLERANCE))
    assert [each.relative for each in found.largest.values()] == pytest.approx(
        [each.relative for each in plain.largest.values()], nan_ok=True
    )
