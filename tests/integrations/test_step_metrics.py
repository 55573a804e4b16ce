"""`examples/step_metrics.py` writes the numbers of every step, by the writer that is asked for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("writer", ["tensorboard", "wandb"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the writers' own imports
def test_a_writer_has_every_step(writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = pytest.importorskip(writer)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["step_metrics.py", "--writer", writer, "--folder", str(tmp_path), "--steps", "3"])
    runpy.run_path("examples/step_metrics.py", run_name="__main__")
    if writer == "wandb":
        assert module.run is None and list(tmp_path.glob("wandb/offline-run-*/run-*.wandb")), "the run has ended"
        return
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "rank0")).Reload()
    assert {"step/loss", "step/seconds", "step/waited", "step/grad_norm"} <= set(events.Tags()["scalars"])
    losses = events.Scalars("step/loss")
    assert [each.step for each in losses] == [1, 2, 3] and losses[-1].value < losses[0].value
