"""A value that a stage passes on and the loss does not need.

https://github.com/pytorch/pytorch/issues/152827

Each stage hands two values to the next one. Whether the second is used depends on the model's configuration; where it is not,
it has no gradient, and a manual stage refuses to send None. FSDP and one process train such a model.
"""

import torch
from museum import batch, compare, eager, equal, gradients, named, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
x, y = batch()


class Part(nn.Module):
    def __init__(self, last=False):
        super().__init__()
        self.layer, self.aside, self.last = nn.Linear(8, 8), nn.Linear(8, 8), last

    def forward(self, h, extra=None):
        out = self.layer(h).tanh()
        return out if self.last else (out, self.aside(h))  # the last part ignores `extra`


class Model(nn.Sequential):
    def forward(self, x):
        return self[1](*self[0](x))


model = Model(Part(), Part(last=True))
expected = eager(model, mse_loss, x, y, 4)


def torch_rank(rank):
    _, mine = torch_step(list(model), mse_loss, x, y, 4, "1F1B")
    return named(model, mine)


def theirs():
    first, second = ranks(torch_rank, 2, seconds=20)
    return compare({name: value for name, value in (first | second).items() if "aside" not in name}, expected)


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y)
    return equal(gradients(model), expected)


show(theirs, ours)
