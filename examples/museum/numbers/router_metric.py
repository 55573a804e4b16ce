"""A reported balance of the experts grows with the number of stages.

https://github.com/databricks/megablocks/issues/85

The same model and data report a load-balancing loss of 0.1005, 0.1007 and 0.1013 with 1, 2 and 4 stages.
"""

from copy import deepcopy

import torch
from museum import batch, not_run, show
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.out = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, h):
        weights = self.router(h).softmax(-1)
        return h + self.out(weights), weights.mean(0).square().sum() / 4


class Model(nn.ModuleList):
    def forward(self, h):
        total = 0.0
        for layer in self:
            h, balance = layer(h)
            total = total + balance
        return h, total


def loss(output, target):
    return mse_loss(output[0], target) + output[1], {"balance": output[1]}


model, (x, y) = Model(Layer() for _ in range(4)), batch()


def theirs():
    return not_run("megablocks")


def ours():
    want = torch.stack([model(piece)[1] for piece in x.chunk(4)]).mean().detach()
    for stages in (1, 2, 4):
        pipe = graphpp.compile(deepcopy(model), loss, split=stages, microbatches=4)
        assert torch.equal(pipe.step(x, target=y).metrics["balance"], want)
    return "1, 2 and 4 stages report the same bits, those of one process"


show(theirs, ours)
