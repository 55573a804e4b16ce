"""A branch on the values of a tensor.

https://github.com/pytorch/pytorch/issues/93579

An exporting tracer follows one path. A Python `if` on a value cannot be traced, and the error should say what to write.
"""

import torch
from museum import batch, eager, equal, gradients, refused, show
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Branching(nn.Module):
    def __init__(self, where=False):
        super().__init__()
        self.first, self.last, self.where = nn.Linear(8, 8), nn.Linear(8, 8), where

    def forward(self, x):
        x = self.first(x)
        if self.where:
            return self.last(torch.where(x.sum() > 0, x.tanh(), x.sin()))
        return self.last(x.tanh() if x.sum() > 0 else x.sin())


x, y = batch()


def theirs():
    pipeline(Branching(), (x[:2],), split_spec={"last": SplitPoint.BEGINNING})
    return "right: traced"


def step(model):
    graphpp.compile(model, mse_loss, split=["last"], microbatches=4).step(x, target=y)


def ours():
    said = refused(lambda: step(Branching()), "torch.where")
    model = Branching(where=True)  # as the error advises
    expected = eager(model, mse_loss, x, y, 4)
    step(model)
    equal(gradients(model), expected)
    return said


show(theirs, ours)
