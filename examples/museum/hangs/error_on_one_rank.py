"""One rank raises, and the job ends half an hour later.

https://github.com/NVIDIA/nccl/issues/1111

A Megatron job stops without an error; after 30 minutes each rank reports a timeout of a collective. Nothing says which rank
stopped, or why. Here the program of the last rank finds a NaN in its data, and is busy with something else for a while.
"""

import time

from museum import Failure, batch, mlp, outcomes, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()


def torch_rank(rank):
    schedule, _ = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    return two_steps(rank, lambda: schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {})))


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4, parallel=graphpp.Parallel(timeout=3))
    return two_steps(rank, lambda: pipe.step(x, target=y))


def two_steps(rank, step):
    step()
    try:
        if rank == 1:
            raise ValueError("a NaN in the second batch")
        step()
    except ValueError:
        time.sleep(30)
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def theirs():
    found = outcomes(torch_rank, 2, seconds=25, timeout=3)[0]
    return f"after the timeout of 3 s, on rank 0, no rank named: {found.text if isinstance(found, Failure) else found}"


def ours():
    found = outcomes(our_rank, 2, seconds=25)[0]
    assert isinstance(found, str) and "RankFailure" in found and "rank 1" in found and "two_steps" in found, found
    return f"after the timeout of 3 s, on rank 0: {found}"


show(theirs, ours)
