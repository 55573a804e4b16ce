"""CPU seconds that `import graphpp` takes over `import torch`, in new processes, in turn.

    python benchmarks/import_time.py [FOLDER ...] [--rounds 9]

Contract: each round starts one process that imports torch and one per folder that imports torch and graphpp from the folder
(this tree without an argument), after a first round that does not count and writes the bytecode. User and system CPU seconds of
the whole process, its exit included; "at exit" is the part after the last import.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

THIS = Path(__file__).parents[1]
CLOCK = "import time; print(time.process_time(), flush=True)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[THIS])
    parser.add_argument("--rounds", type=int, default=9)
    option = parser.parse_args()
    folders = [folder.resolve() for folder in option.folders]
    alone: list[Sample] = []
    over: dict[Path, list[Sample]] = {folder: [] for folder in folders}
    for _ in range(option.rounds + 1):
        alone.append(sample("import torch", THIS))
        for folder in folders:
            over[folder].append(sample("import torch, graphpp", folder) - alone[-1])
    print(f"import torch: {spread(alone[1:])}")
    for folder, samples in over.items():
        print(f"graphpp in {folder.name} over torch: {spread(samples[1:])}")


@dataclass(frozen=True)
class Sample:
    """CPU seconds of one process until the end of its imports, and from there to its end."""

    imports: float
    exit: float

    def __sub__(self, other: Sample) -> Sample:
        return Sample(self.imports - other.imports, self.exit - other.exit)


def spread(samples: list[Sample]) -> str:
    """The least and the median of the imports, and of the exits."""
    imports, exits = [each.imports for each in samples], [each.exit for each in samples]
    return f"{min(imports):.2f} least, {median(imports):.2f} median; at exit {min(exits):.2f}, {median(exits):.2f}"


def sample(program: str, folder: Path) -> Sample:
    """The CPU seconds of a new process that runs the program and finds graphpp in the folder."""
    command = [sys.executable, "-c", f"{program}; {CLOCK}"]
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        imported = float(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"{program} from {folder} failed"
    return Sample(imported, used.ru_utime + used.ru_stime - imported)


if __name__ == "__main__":
    main()
