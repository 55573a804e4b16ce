"""Benchmarks that run where they are not meant to be read: at tiny sizes, on the CPU, so that they run where they are."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_gpu_step(tmp_path: Path) -> None:
    record = tmp_path / "record.json"
    command = [sys.executable, "benchmarks/gpu_step.py", "--small", "--rounds", "1", "--microbatches", "2", "--cudagraphs"]
    found = subprocess.run(
        [*command, "--offload", "0.5", "--compile-backend", "eager", "--json", str(record)],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    samples = json.loads(record.read_text())["samples"]
    assert list(samples) == ["graphpp", "graphpp, graphs", "torch", "torch.compile"]
    assert all(taken[0]["seconds"] > 0 for taken in samples.values())
    assert "it / torch.compile" in found.stdout
