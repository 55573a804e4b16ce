"""A stage hands on more than two values, one of them boolean.

https://github.com/deepspeedai/DeepSpeed/issues/969

The engine assumes two outputs, the last one a mask, which is cast to half precision because NCCL does not send booleans. A
third value, such as positions, is dropped on the way.
"""

import torch
from museum import equal, gradients, not_run, ranks, show
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, h, positions, seen):
        h = h + self.inner(h + positions.cos()).tanh().masked_fill(~seen, 0.0)
        return h, positions + h, seen & (h.detach() > -1.0)


class Model(nn.ModuleList):
    def forward(self, h, positions):
        seen = h > -0.5
        for layer in self:
            h, positions, seen = layer(h, positions, seen)
        return h.masked_fill(~seen, 0.0) + positions


model, x, positions, y = Model(Layer() for _ in range(3)), torch.randn(8, 8), torch.randn(8, 8), torch.randn(8, 8)
for part in range(4):
    rows = slice(2 * part, 2 * part + 2)
    (mse_loss(model(x[rows], positions[rows]), y[rows]) / 4).backward()
expected = gradients(model)
model.zero_grad()


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1", "2"], schedule="1F1B", microbatches=4)
    pipe.step(x, positions, target=y)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def theirs():
    return not_run("deepspeed")


def ours():
    first, second, third = ranks(our_rank, 3)
    return f"{equal(first | second | third, expected)}; three values cross each boundary"


show(theirs, ours)
