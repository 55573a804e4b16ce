"""A gradient that the forward takes.

https://github.com/pytorch/pytorch/issues/125984

Physics-informed models call `torch.autograd.grad` in their forward. Exporting them is an open request.
"""

import torch
from museum import batch, refused, show
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Physics(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.last(self.first(x).tanh()).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]


x, y = batch()


def theirs():
    pipeline(Physics(), (x[:2],), split_spec={"last": SplitPoint.BEGINNING})
    return "right: traced"


def ours():
    return refused(lambda: graphpp.compile(Physics(), mse_loss, split=["last"], microbatches=4).step(x, target=y), "gradient")


show(theirs, ours)
