"""Rank 0 saves, and gathers from ranks that do not.

https://github.com/huggingface/transformers/pull/48569

A trainer calls `save_model` on rank 0 alone. The shards are gathered in there, so rank 0 waits for ranks that never come,
until the watchdog ends the job after 600 s.
"""

import torch
import torch.distributed as dist
from museum import Failure, batch, mlp, outcomes, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()


def their_rank(rank):
    if rank == 0:  # each rank holds a stage
        dist.all_gather([torch.empty(8, 8) for _ in range(2)], model[0][0].weight.detach())
    return "goes on"


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4, parallel=graphpp.Parallel(timeout=3))
    pipe.step(x, target=y)
    try:
        if rank == 0:
            pipe.save_weights("museum-weights")
        else:
            pipe.step(x, target=y)
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def theirs():
    first, _ = outcomes(their_rank, 2, seconds=8)
    return f"rank 0 {first.text if isinstance(first, Failure) else first}"


def ours():
    first, second = outcomes(our_rank, 2, seconds=30)
    assert "save_weights" in str(first) and "step" in str(first), (first, second)
    return f"rank 0: {first}"


show(theirs, ours)
