"""A rank is lost, fails, or is late: the processes of the others end with an error that names the rank, on a GPU too."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed import DEVICE
from tests.parallel.lost_program import TIMEOUT

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "tests.parallel.lost_program"]
START = 60.0  # seconds
ENDS = 60.0 if DEVICE.type == "cuda" else 20.0  # seconds after the timeout; NCCL's watchdog writes its records first


@pytest.mark.nccl
@pytest.mark.exhaustive
@pytest.mark.parametrize("waits", ["step", "item"])
@pytest.mark.parametrize("fate", ["killed", "raises", "late"])
def test_the_others_end_and_name_the_rank(fate: str, waits: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "3"}
    ranks = [
        subprocess.Popen(
            [*PROGRAM, fate, waits], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **shared, "RANK": str(rank), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]  # fmt: skip
    deadline = time.monotonic() + START + TIMEOUT + ENDS
    try:
        said = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank in (0, 2):
        assert ranks[rank].returncode != 0 and "no error" not in said[rank], said[rank]
        assert {"killed": "rank 1 is lost", "raises": "rank 1", "late": "rank 1 did not answer"}[fate] in said[rank], said[rank]
