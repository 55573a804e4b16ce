"""A router's auxiliary loss beside a zero-bubble schedule.

https://github.com/pytorch/torchtitan/pull/2061

Each layer of a mixture of experts adds a loss of its own, which must reach the total although the layer is in an early stage.
The author found that the auxiliary loss works with 1F1B, and is broken for ZBV and interleaved schedules.
"""

from copy import deepcopy

import torch
from museum import batch, compare, eager, equal, gradients, named, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, h, aux=None):
        weights = self.router(h).softmax(-1)
        out = sum(weights[:, i : i + 1] * expert(h).tanh() for i, expert in enumerate(self.experts))
        own = weights.mean(0).square().sum()
        return h + out, own if aux is None else aux + own


class Model(nn.Sequential):
    def forward(self, h):
        return self[1](*self[0](h))


def loss(output, target):
    return mse_loss(output[0], target) + 0.1 * output[1]


model, (x, y) = Model(Layer(), Layer()), batch()
expected = eager(model, loss, x, y, 4)


def theirs():
    copy = deepcopy(model)
    torch_step(list(copy), loss, x, y, 4, "ZBVZeroBubble")
    return compare(named(copy), expected)


def ours():
    pipe = graphpp.compile(model, loss, split=["1"], schedule="ZBVZeroBubble", microbatches=4)
    pipe.step(x, target=y)
    return equal(gradients(model), expected)


show(theirs, ours)
