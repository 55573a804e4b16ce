"""Run everything that needs a GPU on a machine with one GPU: parts with time limits, their results as they come.

    python benchmarks/one_gpu.py --out FOLDER [--parts NAME ..] [--library libnccl.so.2]    on the machine with the GPU
    python benchmarks/one_gpu.py --out FOLDER --rehearse                             the same commands on a CPU, at small sizes

Ranks share the GPU, as NCCL allows from 2.30 on; `--library` is put before torch's own NCCL (LD_PRELOAD). Parts with ranks
run under CUDA MPS, where kernels of several processes run at the same time. A machine without MPS runs them far more slowly,
and their times mean nothing. A client of MPS that is killed takes the server along, so each part has a server of its own, and
the part that kills ranks comes last. Parts, in the order in which they run:

    device      graphpp doctor --calibrate: the curves of this device
    ranks       two ranks speak NCCL: version, first message, a step beside torch's pipelining at small sizes
    numbers     pytest -m nccl: bits of one process under every schedule and mesh
    gpu         pytest -m gpu: one process
    graphs      CUDA graphs against none (cuda_graphs.py)
    speed2      a Llama of 1.1 billion parameters on 2 ranks against torch.distributed.pipelining (nccl.py); speed4: on 4 ranks
    lost        ranks that are killed, raise, and are late

FOLDER gets a log for each part, the parts' records, and `failures.txt` with each test that fails as soon as it does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHOWN = 25  # lines of a part's log


@dataclass(frozen=True)
class Part:
    """A command with its limit in seconds. `shared`: several ranks on one GPU. `small`: options of a rehearsal."""

    seconds: int
    command: str
    small: str = ""
    shared: bool = False


PYTEST = "-m pytest -q -W default -p no:cacheprovider --timeout 120"
RANKS = "-m torch.distributed.run --standalone --nproc-per-node"
TINY = "--small --backend eager --compile-backend aot_eager --microbatches 2 --rounds 1"
PARTS: Mapping[str, Part] = {
    "device": Part(60, "-m graphpp doctor --calibrate {out}/device.json"),
    "ranks": Part(60, f"{RANKS} 2 benchmarks/nccl.py {TINY} --json {{out}}/ranks.json", shared=True),
    "numbers": Part(
        300, f"{PYTEST} -m nccl -n 4 --dist worksteal tests", "-n 0 tests/end_to_end/test_over_nccl.py -k names0-2", shared=True
    ),
    "gpu": Part(150, f"{PYTEST} -m gpu tests/end_to_end", "--collect-only"),
    "graphs": Part(120, "benchmarks/cuda_graphs.py --json {out}/graphs.json", "--tiny --backends eager"),
    "speed2": Part(150, f"{RANKS} 2 benchmarks/nccl.py --json {{out}}/speed2.json", TINY, shared=True),
    "speed4": Part(150, f"{RANKS} 4 benchmarks/nccl.py --json {{out}}/speed4.json", TINY, shared=True),
    "lost": Part(120, f"{PYTEST} -m nccl tests/parallel/test_lost_on_device.py", "-k killed-step", shared=True),
}


def main() -> None:
    option = options()
    option.out.mkdir(parents=True, exist_ok=True)
    for name in option.parts:
        part = PARTS[name]
        command = f"{part.command} {part.small if option.rehearse else ''}".format(out=option.out)
        print(f"==== {name}: {command}", flush=True)
        seconds = part.seconds * (10 if option.rehearse else 1)  # a machine of CI may be busy
        with environment(part, option) as variables:
            print(f"==== {name}: {outcome(command, seconds, variables, option.out / f'{name}.log')}", flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and records")
    parser.add_argument("--parts", nargs="+", default=[*PARTS], choices=[*PARTS])
    parser.add_argument("--library", type=Path, help="libnccl.so.2 of NCCL 2.30 or newer, where torch has an older one")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, over gloo, at small sizes")
    return parser.parse_args()


def outcome(command: str, seconds: int, variables: Mapping[str, str], log: Path) -> str:
    """Run a command of Python, print the end of its log, and return its exit code and time."""
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *command.split()], cwd=ROOT, env=variables, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            code: object = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"stopped at its limit of {seconds} s"
            stop(process)
    print("\n".join(log.read_text(errors="replace").splitlines()[-SHOWN:]), flush=True)
    return f"exit {code}, {time.monotonic() - began:.0f} s"


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a part: torchrun ends its ranks when it is asked to, and leaves them on the GPU when it is killed."""
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def environment(part: Part, option: argparse.Namespace) -> Iterator[dict[str, str]]:
    """The variables of a part; while it runs, an MPS server of its own if its ranks share a GPU."""
    found = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    found["GRAPHPP_TEST_FAILURES"] = str(option.out / "failures.txt")
    if option.rehearse:
        yield {**found, "CUDA_VISIBLE_DEVICES": ""}
        return
    found["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else a process that asks for GPUs can start no other by fork
    if not part.shared:
        yield found
        return
    found |= {"GRAPHPP_TEST_DEVICE": "cuda", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"}
    found |= {"GRAPHPP_TEST_PATIENCE": "60", "NCCL_DEBUG": "VERSION"}
    control = shutil.which("nvidia-cuda-mps-control", path=f"{os.environ['PATH']}:/usr/local/nvidia/bin:/usr/local/cuda/bin")
    print(f"MPS: {control or 'not found: kernels of several ranks take turns'}", flush=True)
    if control:
        folder = option.out / f"mps{time.monotonic_ns()}"
        folder.mkdir()
        found |= {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
        subprocess.run([control, "-d"], env=found, check=True)
    try:
        yield found | ({"LD_PRELOAD": str(option.library)} if option.library else {})
    finally:
        if control:
            subprocess.run([control], input="quit -t 2\n", text=True, env=found, check=False, timeout=20)


if __name__ == "__main__":
    main()
