"""A process died, and the others wait.

https://github.com/NVIDIA/nccl/issues/395

One process is gone, often out of memory. The others wait in a collective until a timeout of half an hour, if there is one.
"""

import os
import signal
import time

from museum import Failure, batch, mlp, outcomes, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()


def torch_rank(rank):
    schedule, _ = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    return die_in_the_second(rank, lambda: schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {})))


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    return die_in_the_second(rank, lambda: pipe.step(x, target=y))


def die_in_the_second(rank, step):
    step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "no error", time.monotonic() - start


def said(value):
    return value.text if isinstance(value, Failure) else f"after {value[1]:.1f} s {value[0]}"


def theirs():
    return said(outcomes(torch_rank, 2, seconds=20)[0])


def ours():
    found = outcomes(our_rank, 2, seconds=60)[0]
    assert not isinstance(found, Failure) and "rank 1" in found[0] and found[1] < 10
    return said(found)


show(theirs, ours)
