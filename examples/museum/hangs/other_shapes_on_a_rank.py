"""Ranks disagree about the size of a microbatch.

https://github.com/pytorch/PiPPy/issues/946

The buffers of messages have fixed shapes. If a rank runs a batch of another size than its neighbour expects, the job hangs or
crashes; the thread asks for a check at execution time.
"""

from museum import Failure, batch, mlp, outcomes, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch(16)


def torch_rank(rank):
    schedule, _ = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    for rows in (16, 16 if rank else 8):
        schedule.step(*((x[:rows],) if rank == 0 else ()), **({"target": y[:rows]} if rank else {}))
    return "right: no error, and no hang"


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y)
    rows = 16 if rank else 8
    try:
        pipe.step(x[:rows], target=y[:rows])
    except graphpp.MismatchError as error:
        return str(error)
    return "no error"


def theirs():
    found = outcomes(torch_rank, 2, seconds=10)
    failed = [f"rank {rank} {each.text}" for rank, each in enumerate(found) if isinstance(each, Failure)]
    return "; ".join(failed) if failed else found[0]


def ours():
    found = outcomes(our_rank, 2, seconds=60)
    for each in found:
        assert isinstance(each, str) and "rank" in each and "8" in each, found
    return f"both ranks raise a MismatchError at once: {found[0]}"


show(theirs, ours)
