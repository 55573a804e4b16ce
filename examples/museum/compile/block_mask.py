"""flex_attention's mask beside a split backward.

https://github.com/pytorch/torchtitan/issues/3584

A `BlockMask` goes to every stage as an argument. Schedules that split the backward walk over all arguments for their
gradients, and fail: 'BlockMask' object has no attribute 'requires_grad'.
"""

import torch
from museum import equal, gradients, show, torch_pipeline
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
B, L, W = 4, 128, 16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.bias = nn.Linear(W, W), nn.Parameter(torch.zeros(W))

    def forward(self, x, mask):
        query = x.detach().view(x.shape[0], 1, L, W)  # the CPU has no backward of flex_attention
        seen = flex_attention(query, query, query, block_mask=mask).view(x.shape)
        return self.inner(x + seen).tanh() + self.bias


class Model(nn.ModuleList):
    def forward(self, x, mask):
        for layer in self:
            x = layer(x, mask)
        return x


model, x, y = Model(Layer() for _ in range(2)), torch.randn(B, L, W), torch.randn(B, L, W)
mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, L, L, device="cpu")
for rows in (slice(0, 2), slice(2, 4)):
    (mse_loss(model(x[rows], mask), y[rows]) / 2).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    schedule, _ = torch_pipeline(list(model), mse_loss, 2, "ZBVZeroBubble")
    schedule.step(x, target=y, losses=[], return_outputs=False, mask=mask)
    return "right: a step with a BlockMask ends"


def ours():
    model.zero_grad()
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="ZBVZeroBubble", microbatches=2)
    pipe.step(x, mask=mask, target=y)
    return equal(gradients(model), expected, close=1e-6)


show(theirs, ours)
