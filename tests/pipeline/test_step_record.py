"""The record of a run: bounded, without a wait, with the numbers of the steps that it keeps."""

from __future__ import annotations

from math import isnan

import pytest
import torch

from graphpp.pipeline import step_record
from graphpp.pipeline.step_record import StepRecord


def recorded(steps: int, monkeypatch: pytest.MonkeyPatch, most: int = 8) -> StepRecord:
    """A record of steps that take a second each; the loss of a step is its number."""
    monkeypatch.setattr(step_record, "_MOST", most)
    record = StepRecord()
    for step in range(1, steps + 1):
        monkeypatch.setattr(step_record.time, "perf_counter", lambda now=float(step): now)
        record.add(torch.tensor(float(step)))
    return record


def test_a_short_run_has_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    view = recorded(3, monkeypatch).view()
    assert view.losses.values == (1, 2, 3) and view.losses.every == 1
    assert isnan(view.seconds.values[0]) and view.seconds.values[1:] == (1, 1)
    assert "optimizer" in view.note


@pytest.mark.parametrize("steps", [7, 8, 9, 15, 16, 17, 100, 1000])
def test_a_long_run_keeps_every_nth_step(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    view = recorded(steps, monkeypatch).view()
    every = view.losses.every
    assert view.losses.values == tuple(range(every, steps + 1, every))
    assert len(view.losses.values) < 8 and view.seconds.values[1:] == (1,) * (len(view.losses.values) - 1)


def test_the_caller_s_numbers_stand_for_the_recorded_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded(3, monkeypatch)
    view = record.view(losses=[9, 8])
    assert view.losses.values == (9, 8) and len(view.seconds.values) == 3
    view = record.view(seconds=[0.5])
    assert view.losses.values == (1, 2, 3) and view.seconds.values == (0.5,) and view.note == ""
    assert not record.view([], [])
