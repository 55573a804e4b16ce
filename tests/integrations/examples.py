"""Runs the scripts of examples/, on ranks or in their form for one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def run_example(script: str, output: Path, *more: str, ranks: int = 1, changes: Mapping[str, str] | None = None) -> str:
    """The output of `script OUTPUT MORE..`, started by torchrun for several ranks. `changes`: texts -> new ones."""
    path = ROOT / "examples" / script
    if changes:
        text = path.read_text()
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        path = output.parent / script
        path.write_text(text)
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1", "HF_HOME": str(output)}
    launcher = (*_TORCHRUN, str(ranks)) if ranks > 1 else ()
    line = [sys.executable, *launcher, str(path), str(output), *more]
    done = subprocess.run(line, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
