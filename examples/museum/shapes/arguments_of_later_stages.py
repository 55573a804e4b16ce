"""Arguments that are no tensors, for a later stage.

https://github.com/pytorch/pytorch/issues/130055

Stages after the first take tensors alone as positional arguments, since buffers are made for all of them. An option or None
must be built into the stage.
"""

import torch
from museum import compare, equal, gradients, named, show, torch_pipeline
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class First(nn.Linear):
    def forward(self, x, scale=1.0, mode=None):
        return super().forward(x) * scale, scale, mode


class Second(nn.Linear):
    def forward(self, h, scale, mode):
        return super().forward(h.tanh() if mode == "tanh" else h) / scale


class Model(nn.Sequential):
    def forward(self, x, scale=1.0, mode=None):
        return self[1](*self[0](x, scale, mode))


model, x, y = Model(First(8, 8), Second(8, 8)), torch.randn(8, 8), torch.randn(8, 8)
for piece, target in zip(x.chunk(4), y.chunk(4), strict=True):
    (mse_loss(model(piece, 2.0, "tanh"), target) / 4).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    schedule, _ = torch_pipeline(list(model), mse_loss, 4, "Interleaved1F1B")
    schedule.step(x, 2.0, "tanh", target=y, losses=[], return_outputs=False)
    return compare(named(model), expected)


def ours():
    model.zero_grad()
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, 2.0, "tanh", target=y)
    return f"{equal(gradients(model), expected)}; a number and a text reach the second stage"


show(theirs, ours)
