"""The last rank evaluates, and the others have gone on.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6025

The rank that writes the log runs an evaluation of its own. The pipeline's schedule waits for activations of ranks that never
started it.
"""

from museum import Failure, batch, mlp, outcomes, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()


def torch_rank(rank):
    schedule, _ = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
    if rank == 1:
        schedule.eval(target=y, losses=[])
    return "goes on"


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4, parallel=graphpp.Parallel(timeout=20))
    pipe.step(x, target=y)
    try:
        if rank == 1:
            pipe.eval(x, target=y)
        else:
            pipe.step(x, target=y)  # goes on with the training
    except graphpp.GraphPPError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def theirs():
    _, second = outcomes(torch_rank, 2, seconds=10)
    return f"rank 1 {second.text if isinstance(second, Failure) else second}"


def ours():
    found = outcomes(our_rank, 2, seconds=60)
    for each in found:
        assert "MismatchError" in each and "eval" in each, found
    return f"both ranks raise at once: {found[1]}"


show(theirs, ours)
