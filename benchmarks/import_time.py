"""CPU seconds of `import graphpp` in a process that has imported torch, from several folders in turn.

    python benchmarks/import_time.py [FOLDER ...] [--rounds 9]

Contract: each round starts one new process per folder (this tree without an argument), after a first round that does not count
and writes the bytecode. User and system CPU seconds of the process, until torch is imported and from there until graphpp is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from statistics import median

PROGRAM = """
import time
import torch
torch_seconds = time.process_time()
import graphpp
print(torch_seconds, time.process_time() - torch_seconds)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--rounds", type=int, default=9)
    option = parser.parse_args()
    folders = [folder.resolve() for folder in option.folders]
    rounds = [[seconds(folder) for folder in folders] for _ in range(option.rounds + 1)][1:]
    for folder, samples in zip(folders, zip(*rounds, strict=True), strict=True):
        torch, graphpp = zip(*samples, strict=True)
        print(f"{folder.name}: torch {spread(torch)}; graphpp {spread(graphpp)}")


def spread(values: tuple[float, ...]) -> str:
    """The least and the median of some seconds."""
    return f"{min(values):.2f} least, {median(values):.2f} median"


def seconds(folder: Path) -> tuple[float, float]:
    """The CPU seconds of a new process that finds graphpp in the folder: of torch's import, and of graphpp's."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    torch, graphpp = map(float, done.stdout.split())
    return torch, graphpp


if __name__ == "__main__":
    main()
