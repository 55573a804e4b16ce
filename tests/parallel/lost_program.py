"""A rank of a training that loses rank 1 in its fourth step: `python -m tests.parallel.lost_program FATE WAITS`.

FATE: "killed", "raises", or "late" by more than the timeout. WAITS "item": the host waits for each step's loss, which on a
GPU is the place where it notices that a message is missing; "step": the next step notices. torchrun's variables say rank and
ranks.
"""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

import graphpp
from graphpp.runtime.task import Task
from tests.distributed import DEVICE

TIMEOUT = 6.0  # seconds


def main(fate: str, waits: str) -> None:
    rank, ranks = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(ranks))), torch.randn(64, 64, device=DEVICE)
    split = [str(stage) for stage in range(1, ranks)]
    device = torch.device("cuda", rank % torch.cuda.device_count()) if DEVICE.type == "cuda" else DEVICE
    parallel = graphpp.Parallel(device=device, timeout=TIMEOUT)
    pipe = graphpp.compile(model, F.mse_loss, split=split, schedule="1F1B", microbatches=8, parallel=parallel)
    for step in range(6):
        if step == 3 and rank == 1:
            Task.arguments = failing(fate)  # type: ignore[method-assign]
        loss = pipe.step(x, target=x).loss
        if waits == "item":
            loss.item()
    print("no error", flush=True)


def failing(fate: str) -> object:
    """`Task.arguments` that meets its fate when it is called for the fifth time."""
    usual, calls = Task.arguments, iter(range(1_000_000))

    def arguments(task: Task) -> object:
        if next(calls) == 4:
            if fate == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if fate == "raises":
                raise RuntimeError("out of luck")
            time.sleep(3 * TIMEOUT)
        return usual(task)

    return arguments


if __name__ == "__main__":
    main(*sys.argv[1:])
