"""Activation checkpointing beside a zero-bubble schedule.

https://github.com/pytorch/pytorch/issues/136766

A model with checkpointed layers runs out of memory under zero bubble, which recomputes a layer for each group of weights.
"""

from copy import deepcopy

import torch
from museum import batch, eager, equal, gradients, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import graphpp


class Products(TorchDispatchMode):
    count = 0  # of the first product of a layer, whose bias has 32 numbers

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator is torch.ops.aten.addmm.default and args[0].shape == (32,)
        return operator(*args, **(kwargs or {}))


class Layer(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x):
        return x + super().forward(x)


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(self[0], x, use_reentrant=False)


model, (x, y) = nn.Sequential(Layer(), Layer()), batch()
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    with Products() as products:
        torch_step([Checkpointed(layer) for layer in deepcopy(model)], mse_loss, x, y, 4, "ZBVZeroBubble")
    return f"{products.count / 8:.1f} forwards of a layer for each microbatch, those of a trial run included"


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="ZBVZeroBubble", microbatches=4, memory="full")
    pipe.prepare(x, target=y)
    with Products() as products:
        pipe.step(x, target=y)
    assert products.count == 16, products.count
    return f"{equal(gradients(model), expected)}; 2 forwards of a layer for each microbatch under ZBVZeroBubble"


show(theirs, ours)
