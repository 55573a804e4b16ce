"""`PipelineSFTTrainer` against TRL's own SFTTrainer in one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("trl")

ROOT = Path(__file__).parents[2]
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NUMBERS = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch")


def example(folder: Path, plain: bool) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The log and the adapter of the example, on two ranks, or with `plain` in its form for one process."""
    script, launcher = ROOT / "examples" / "trl_sft.py", [*TORCHRUN]
    if plain:
        text = script.read_text().replace("graphpp.integrations.trl import (\n    PipelineSFTTrainer as", "trl import (")
        script, launcher = folder.with_suffix(".py"), []
        script.write_text(text.replace(', pipeline={"schedule": "1F1B"}', ""))
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder)}
    line = [sys.executable, *launcher, str(script), str(folder)]
    done = subprocess.run(line, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return history, load_file(folder / "final" / "adapter_model.safetensors")


def test_packed_lora_trains_as_in_one_process(tmp_path: Path) -> None:
    (found, adapter), (expected, values) = example(tmp_path / "own", False), example(tmp_path / "plain", True)
    for mine, theirs in zip(found, expected, strict=True):
        for name in NUMBERS:
            assert mine.get(name) == (pytest.approx(theirs[name], rel=1e-6) if name in theirs else None), name
    assert adapter.keys() == values.keys() and len(values) == 16
    for name, value in values.items():
        torch.testing.assert_close(adapter[name], value)
