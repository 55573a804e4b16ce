"""A pipeline that runs on holds no more than it did, and the soak would tell if it did."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SOAK = ROOT / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> dict[str, Any]:
    """The names of the benchmark."""
    sys.path.insert(0, str(SOAK.parent))
    try:
        return runpy.run_path(str(SOAK))
    finally:
        sys.path.remove(str(SOAK.parent))


@pytest.mark.exhaustive  # `test_growth_is_told` reads the same notes
@pytest.mark.parametrize("steps", [100, 200])
def test_nothing_grows_on_two_ranks(steps: int) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(SOAK), "--steps", str(steps), "--every", "10"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing grew" in ended.stdout


@pytest.mark.parametrize("what", ["threads", "python_threads", "files", "tensors", "mib"])
def test_growth_is_told(soak: dict[str, Any], what: str) -> None:
    note, bounds = soak["Note"](100.0, 4, 2, 9, 50), soak["BOUNDS"]
    allowed = getattr(bounds, what)
    steps = [replace(note, **{what: getattr(note, what) + number}) for number in (0, 0, allowed, allowed + 1)]
    assert soak["grown"](steps[:3]) == []
    assert [fault.split()[0] for fault in soak["grown"](steps)] == [what]
    assert [fault.split()[0] for fault in soak["grown"](steps, warm_up=3)] == ([what] if allowed == 0 else [])
    assert soak["grown"]([*steps, steps[-1]], warm_up=4) == []


def test_one_note_tells_nothing(soak: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more steps"):
        soak["grown"]([soak["Note"].now()])


ENDING = """
import atexit, contextlib, gc, os, time
from pathlib import Path
import torch.distributed as dist

def threads():
    found = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends at this moment
            found.append(Path(f"/proc/self/task/{each}/comm").read_text())
    return sum("gloo" in name for name in found)

def at_exit():
    until = time.monotonic() + 10  # Linux lists a thread for a moment after it was joined
    while threads() and time.monotonic() < until:
        time.sleep(0.01)
    print("at exit", threads())

atexit.register(at_exit)  # before graphpp's own, so it runs after it

import torch, graphpp
from torch import nn

def work():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.randn(4, 4)
    graphpp.compile(model, nn.functional.mse_loss, split=["1"], microbatches=2).step(x, target=x)

gc.disable()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
work()
print("in use", threads())
dist.destroy_process_group()
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux for the names of threads")
def test_no_thread_of_the_process_group_is_left_at_exit() -> None:
    """One that lets go of a message while the interpreter shuts down ends the process with SIGABRT."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True, timeout=600, check=True
    )
    told = dict(line.rsplit(" ", 1) for line in ended.stdout.splitlines() if line.startswith(("in use", "at exit")))
    assert int(told["in use"]) > 0
    assert told["at exit"] == "0"
