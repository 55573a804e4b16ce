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

ROOT = Path(__file__).parent.parent
SOAK = ROOT / "benchmarks" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> dict[str, Any]:
    """The names of the benchmark."""
    sys.path.insert(0, str(SOAK.parent))
    try:
        return runpy.run_path(str(SOAK))
    finally:
        sys.path.remove(str(SOAK.parent))


@pytest.mark.slow
def test_two_hundred_steps_on_two_ranks() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*launcher, str(SOAK), "--steps", "200", "--every", "10"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "nothing grew" in ended.stdout


@pytest.mark.parametrize("what", ["threads", "python_threads", "files", "tensors", "mib"])
def test_growth_is_told(soak: dict[str, Any], what: str) -> None:
    note, bounds = soak["Note"](100.0, 4, 2, 9, 50), soak["BOUNDS"]
    allowed = getattr(bounds, what)
    steps = [replace(note, **{what: getattr(note, what) + number}) for number in (0, 0, allowed, allowed + 1)]
    assert soak["grown"](steps[:3]) == []
    assert [fault.split()[0] for fault in soak["grown"](steps)] == [what]


def test_one_note_tells_nothing(soak: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="more steps"):
        soak["grown"]([soak["Note"].now()])
