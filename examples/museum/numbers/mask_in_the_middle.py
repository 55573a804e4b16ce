"""The padding mask is None in the middle of the pipeline.

https://github.com/NVIDIA/Megatron-LM/issues/752

Only hidden states travel between stages, and stages in the middle have no batch. With four stages or more, layers in the
middle run without the mask, and results differ from those of another layout.
"""

import torch
from museum import equal, gradients, not_run, show
from torch import nn
from torch.nn import functional as F

import graphpp

torch.manual_seed(0)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, h, mask):
        query, key, value = self.qkv(h).chunk(3, -1)
        return h + F.scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, :])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, h, mask):
        for layer in self.layers:
            h = layer(h, mask)
        return h


model, x, y = Model(), torch.randn(8, 6, 8), torch.randn(8, 6, 8)
mask = torch.arange(6) < torch.randint(2, 7, (8, 1))
for part in range(4):
    rows = slice(2 * part, 2 * part + 2)
    (F.mse_loss(model(x[rows], mask[rows]), y[rows]) / 4).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    return not_run("megatron-core")


def ours():
    pipe = graphpp.compile(model, F.mse_loss, split=4, microbatches=4)
    pipe.step(x, mask=mask, target=y)
    return f"{equal(gradients(model), expected)}, in 4 stages"


show(theirs, ours)
