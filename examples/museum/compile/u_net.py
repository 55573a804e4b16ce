"""A U-Net.

https://github.com/hpcaitech/ColossalAI/issues/2490

Pipelines of layers in a row cannot hold a U-Net, whose way down feeds every level of its way up. The thread asks for an
example of a model that is no sequence.
"""

from itertools import pairwise

import torch
from museum import eager, equal, gradients, not_run, show
from torch import nn
from torch.nn.functional import interpolate, mse_loss

import graphpp

torch.manual_seed(0)


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (4, 8, 16)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise(widths))
        self.up = nn.ModuleList(nn.Conv2d(a + b, b, 3, padding=1) for a, b in ((16, 8), (8, 4)))
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        levels = [self.stem(x)]
        for layer in self.down:
            levels.append(layer(levels[-1]).relu())
        x = levels.pop()
        for layer in self.up:
            x = layer(torch.cat([interpolate(x, scale_factor=2.0), levels.pop()], 1)).relu()
        return self.head(x)


model, x, y = UNet(), torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)


def theirs():
    return not_run("colossalai")


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["down.0", "up.0", "up.1"], schedule="Interleaved1F1B", microbatches=2)
    pipe.step(x, target=y)
    return f"{equal(gradients(model), eager(model, mse_loss, x, y, 2))}, in 4 stages"


show(theirs, ours)
