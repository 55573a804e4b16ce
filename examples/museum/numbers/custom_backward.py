"""A custom backward runs in both halves of a split backward.

https://github.com/pytorch/pytorch/issues/174017

Zero bubble takes the gradients of inputs and weights apart. A custom `autograd.Function` does not know which half is asked for, and
computes all gradients both times.
"""

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
        x, weight = ctx.saved_tensors
        calls.append(1)
        return gradient @ weight.T, x.T @ gradient


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x):
        return Product.apply(x, self.weight).tanh()


model, (x, y) = nn.Sequential(*(Layer() for _ in range(4))), batch()
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    calls.clear()
    torch_step([model[:2], model[2:]], mse_loss, x, y, 4, "ZBVZeroBubble")
    equal(named(model), expected)
    model.zero_grad()
    said = f"{len(calls)} calls of the backward for 4 layers and 4 microbatches"
    return f"right: {said}" if len(calls) <= 16 else said


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["2"], schedule="ZBVZeroBubble", microbatches=4)
    pipe.prepare(x, target=y)
    calls.clear()
    pipe.step(x, target=y)
    assert len(calls) < 16
    return f"{equal(gradients(model), expected)}; the operations of the backward are in the graph, each in one half"


if __name__ == "__main__":
    show(theirs, ours)
