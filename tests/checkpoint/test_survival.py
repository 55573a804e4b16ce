"""A rank that is killed at any moment costs the steps since the last checkpoint, and nothing else."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.survival import survive, undisturbed
from tests.exhaustive import further

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [0, *further(*range(1, 100))])
def test_a_training_survives_a_kill(seed: int) -> None:
    survive(random.Random(seed), undisturbed())


KILLED = """
import os, runpy, signal, sys
from graphpp.runtime.action_loop import ActionLoop

run, calls = ActionLoop.run, 0

def killed(loop, watch=None):
    global calls
    calls += 1
    if calls == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if "LOST_MACHINE" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)
        if "LOST_MACHINE" in os.environ or os.environ["RANK"] == os.environ.get("LOST_RANK"):
            os.kill(os.getpid(), signal.SIGKILL)
    run(loop, watch)

ActionLoop.run = killed
sys.argv = ["train_llama.py", *sys.argv[1:]]
sys.path.insert(0, "examples")
runpy.run_path("examples/train_llama.py", run_name="__main__")
"""
SIZES = {"steps": 10, "every": 2, "dim": 64, "layers": 8, "batch": 4, "microbatches": 4, "length": 8}


def launched(scratch: Path, *launch: str, **environment: str) -> subprocess.Popen[str]:
    """torchrun with the example, of which a rank or a machine is killed in the seventh step."""
    script = scratch / "killed.py"
    script.write_text(KILLED)
    small = [f"--{name}={value}" for name, value in SIZES.items()]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", *launch]
    return subprocess.Popen(
        [*torchrun, str(script), *small, "--device=cpu", f"--folder={scratch / 'run'}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def free_port() -> int:
    """A port that nobody listens on, below those that Linux gives away by itself."""
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        with contextlib.suppress(OSError), socket.socket() as found:
            found.bind(("localhost", port))
            return port
    raise OSError("no port is free")


EQUAL = "largest difference from one plain process: losses 0, parameters 0"


@pytest.mark.exhaustive  # `test_a_training_survives_a_kill` kills ranks without torchrun
def test_the_example_goes_on_after_a_rank_was_killed(tmp_path: Path) -> None:
    """The seventh step is lost; the restart goes on from the sixth, which the first half of another schedule has made."""
    job = launched(tmp_path, "--standalone", LOST_RANK="1")
    out, errors = job.communicate(timeout=600)
    assert job.returncode == 0, errors[-3000:]
    assert EQUAL in out
    assert "exitcode: -9" in errors


@pytest.mark.exhaustive  # `test_a_training_survives_a_kill` loses machines too
def test_the_example_goes_on_without_a_lost_machine(tmp_path: Path) -> None:
    """Two agents of torchrun with two ranks each; one dies with its ranks, and two ranks go on from the sixth step."""
    meeting = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-conf"]
    rounds = "last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=10,is_host"  # the first agent holds the store
    stays = launched(tmp_path, *meeting, f"{rounds}=true")
    lost = launched(tmp_path, *meeting, f"{rounds}=false", LOST_MACHINE="1")
    out, errors = stays.communicate(timeout=600)
    lost.communicate(timeout=600)
    assert lost.returncode == -9
    assert stays.returncode == 0, errors[-3000:]
    assert EQUAL in out
