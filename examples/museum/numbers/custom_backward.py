"""A custom backward runs in both halves of a split backward.

https://github.com/pytorch/pytorch/issues/174017

Zero bubble takes the gradients of inputs and weights apart. A custom `autograd.Function` does not know which half is asked
for, and computes all gradients both times.
"""

from copy import deepcopy

import torch
from museum import batch, eager, equal, gradients, named, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
calls = []


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        calls.append(x := ctx.saved_tensors[0])
        return gradient @ ctx.saved_tensors[1].T, x.T @ gradient


class Layer(nn.Linear):
    def forward(self, x):
        return Product.apply(x, self.weight).tanh()


model, (x, y) = nn.Sequential(*(Layer(8, 8, bias=False) for _ in range(4))), batch()
expected = eager(model, mse_loss, x, y, 4)
calls.clear()


def theirs():
    torch_step([(copy := deepcopy(model))[:2], copy[2:]], mse_loss, x, y, 4, "ZBVZeroBubble")
    equal(named(copy), expected)
    return f"{'right: ' * (len(calls) <= 16)}{len(calls)} calls of the backward for 4 layers and 4 microbatches"


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["2"], schedule="ZBVZeroBubble", microbatches=4)
    calls.clear()
    pipe.step(x, target=y)
    assert len(calls) < 16
    return f"{equal(gradients(model), expected)}; the operations of the backward are in the graph"


show(theirs, ours)
