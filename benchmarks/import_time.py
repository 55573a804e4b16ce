"""CPU seconds of `import graphpp` alone, and of its public names in a process that has imported torch, by folder.

    python benchmarks/import_time.py [FOLDER ...] [--rounds 9]

Contract: each round starts one new process per folder (this tree without an argument), after a first round that does not count
and writes the bytecode. User and system CPU seconds of the process: until graphpp is imported, from there until torch is, and
from there until all names of graphpp are loaded.
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
import graphpp
alone = time.process_time()
import torch
with_torch = time.process_time()
for name in graphpp.__all__:
    getattr(graphpp, name)
print(alone, with_torch - alone, time.process_time() - with_torch)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--rounds", type=int, default=9)
    option = parser.parse_args()
    folders = [folder.resolve() for folder in option.folders]
    rounds = [[seconds(folder) for folder in folders] for _ in range(option.rounds + 1)][1:]
    for folder, samples in zip(folders, zip(*rounds, strict=True), strict=True):
        alone, torch, names = zip(*samples, strict=True)
        print(f"{folder.name}: import graphpp {spread(alone)}; torch {spread(torch)}; all names {spread(names)}")


def spread(values: tuple[float, ...]) -> str:
    """The least and the median of some seconds."""
    return f"{min(values):.2f} least, {median(values):.2f} median"


def seconds(folder: Path) -> tuple[float, ...]:
    """The CPU seconds of a new process that finds graphpp in the folder: to graphpp's import, of torch's, of all names."""
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return tuple(map(float, done.stdout.split()))


if __name__ == "__main__":
    main()
