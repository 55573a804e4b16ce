"""The command line as processes of its own: entry points, exit codes, Ctrl-C, ranks under torchrun."""

import importlib
import json
import os
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import pytest

import graphpp
from graphpp.cli.app import main
from tests.cli.running import write
from tests.exhaustive import further

ROOT = Path(__file__).parents[2]
SLOW = """
    import time

    def build():
        print("ready", flush=True)
        for _ in range(3000):  # a signal that comes just before a sleep is noticed after it
            time.sleep(0.1)
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def command(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    whole = [sys.executable, *arguments]
    return subprocess.run(whole, cwd=folder, env=environment(), capture_output=True, text=True, timeout=600, check=False)


def test_the_script_of_the_project_is_this_command_line() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["graphpp"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_the_module(tmp_path: Path) -> None:
    """As the script runs it, `main` ends the process with the command's exit code."""
    (tmp_path / "wrong.csv").write_text("0F0,0F0\n")
    refused = command("-c", "from graphpp.cli.app import main; main()", "schedule", "check", "wrong.csv", folder=tmp_path)
    assert refused.returncode == 1, refused.stderr
    unknown = command("-m", "graphpp", "schedule", "check", "none.csv", "--json", folder=tmp_path)
    assert unknown.returncode == 2
    assert json.loads(unknown.stdout)["error"]["type"] == "GraphPPError"
    assert unknown.stderr == "graphpp.errors.GraphPPError: none.csv cannot be read: No such file or directory\n"


@pytest.mark.parametrize("option", [[], *further(["--json"])])
def test_interrupt_ends_with_130_and_without_a_word(tmp_path: Path, option: list[str]) -> None:
    write(tmp_path / "slow.py", SLOW)
    process = subprocess.Popen(
        [sys.executable, "-m", "graphpp", "verify", "slow.py:build", *option],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - a shell's background jobs ignore it
    )  # fmt: skip
    try:
        printed = process.stderr if option else process.stdout
        assert printed is not None
        assert printed.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")


@pytest.mark.exhaustive
def test_torchrun_measures_the_links(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "graphpp")
    done = command(*torchrun, "doctor", "--json", "--size", "64KiB", "--repeats", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [link["ranks"] for link in found["links"]] == [[0, 1]]
    assert found["links"][0]["latency"] > 0
    assert found["versions"]["graphpp"] == graphpp.__version__
