"""Runs the scripts of examples/, on ranks or in their form for one process."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

from accelerate.state import AcceleratorState, GradientState  # type: ignore[import-untyped]

from tests.distributed import run_ranks

ROOT = Path(__file__).parents[2]
_TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


def as_process(rank: int, ranks: int) -> None:
    """The variables that torchrun sets (none for one process), and no state of an earlier Accelerator of this process."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ["OMP_NUM_THREADS"] = "1"  # Lightning sets the threads of a process that has no such variable
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "TORCHELASTIC_RUN_ID": "tests"}
    for name, value in names.items():
        os.environ.pop(name, None) if ranks == 1 else os.environ.update({name: str(value)})


def run_example(
    script: str, output: Path, *more: str, ranks: int = 1, changes: Mapping[str, str] | None = None, launched: bool = False
) -> str:
    """The output of the first rank of `script OUTPUT MORE..`. `changes`: texts -> new ones.

    The script runs in the processes of `run_ranks`, which have imported torch; with `launched` in its own, by torchrun for
    several ranks.
    """
    path = ROOT / "examples" / script
    if changes:
        text = path.read_text()
        for old, new in changes.items():
            assert old in text, old
            text = text.replace(old, new)
        path = output.parent / Path(script).name
        path.write_text(text)
    if not launched:
        return str(run_ranks(_run, ranks, ranks, path, [str(output), *more])[0])
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}", "OMP_NUM_THREADS": "1", "HF_HOME": str(output)}
    launcher = (*_TORCHRUN, str(ranks)) if ranks > 1 else ()
    line = [sys.executable, *launcher, str(path), str(output), *more]
    done = subprocess.run(line, env={**os.environ, **own}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _run(rank: int, ranks: int, path: Path, arguments: list[str]) -> str:
    """Run a script as the main module of this rank; its output."""
    as_process(rank, ranks)
    changed = patch.multiple(sys, argv=[str(path), *arguments], path=[str(ROOT / "examples"), *sys.path])
    with changed, warnings.catch_warnings(action="ignore"), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()
