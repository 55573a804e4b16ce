"""A skip connection between stages that are not neighbours.

https://github.com/pytorch/pytorch/issues/127964

1F1B and Interleaved1F1B take messages from neighbouring ranks alone. A value that skips a stage is not supported.
"""

import torch
from museum import batch, compare, eager, equal, gradients, ranks, show
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        first = self.first(x).tanh()
        return self.last(self.middle(first).tanh() + first)


model, (x, y) = Skipping(), batch()
expected = eager(model, mse_loss, x, y, 4)


def torch_rank(rank):
    starts = {"middle": SplitPoint.BEGINNING, "last": SplitPoint.BEGINNING}
    stage = pipeline(model, (x[:2],), split_spec=starts).build_stage(rank, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=mse_loss)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y, "losses": []} if rank == 2 else {}))
    return gradients(stage.submod)


def theirs():
    first, middle, last = ranks(torch_rank, 3, seconds=20)
    return compare(first | middle | last, expected)


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["middle", "last"], schedule="1F1B", microbatches=4)
    pipe.step(x, target=y)
    return f"{equal(gradients(model), expected)}; the value is relayed through the middle stage"


show(theirs, ours)
