"""A rank that is killed at any moment costs the steps since the last checkpoint, and nothing else."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exhaustive import further
from tests.pipeline.checkpoint.survival import survive, undisturbed

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("seed", [*range(4), *further(*range(4, 100))])
def test_a_training_survives_a_kill(seed: int) -> None:
    survive(random.Random(seed), undisturbed())


KILLED = """
import os, runpy, signal, sys
from graphpp.runtime.action_loop import ActionLoop

run, calls = ActionLoop.run, 0

def killed(loop, watch=None):
    global calls
    calls += 1
    if calls == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    run(loop, watch)

ActionLoop.run = killed
sys.argv = ["train_llama.py", *sys.argv[1:]]
sys.path.insert(0, "examples")
runpy.run_path("examples/train_llama.py", run_name="__main__")
"""


@pytest.mark.slow
def test_the_example_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    """The seventh step is lost; the restart goes on from the sixth, which the first half of another schedule has made."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    sizes = {"steps": 10, "every": 2, "dim": 64, "layers": 4, "batch": 4, "microbatches": 4, "length": 8}
    small = [f"--{name}={value}" for name, value in sizes.items()]
    ended = subprocess.run(
        [*launch, str(script), *small, "--device=cpu", f"--folder={tmp_path / 'run'}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "largest difference from one plain process: losses 0, parameters 0" in ended.stdout
    assert "exitcode: -9" in ended.stderr
