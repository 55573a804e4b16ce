"""Recomputation updates the statistics of a batch norm twice.

https://github.com/pytorch/pytorch/issues/62471

The forward of a checkpointed block runs again in the backward, and with it the update of running statistics.
"""

from copy import deepcopy

import torch
from museum import batch, equal, error, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import graphpp

torch.manual_seed(0)


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())


class Checkpointed(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


model, (x, y) = nn.Sequential(Block(), Block()), batch(16)
plain = deepcopy(model)
for piece, target in zip(x.chunk(4), y.chunk(4), strict=True):
    (mse_loss(plain(piece), target) / 4).backward()
expected = dict(plain.named_buffers())


def theirs():
    copy = deepcopy(model)
    torch_step([Checkpointed(block) for block in copy], mse_loss, x, y, 4)
    found = dict(copy.named_buffers())
    count, (distance, _) = int(found["0.1.num_batches_tracked"]), error(found, expected)
    said = f"{count} updates for 4 microbatches, one of a trial run among them"
    return f"right: {said}" if distance == 0 else f"wrong, silently: {said}"


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4, memory="full")
    pipe.step(x, target=y)
    return f"statistics {equal(dict(model.named_buffers()), expected)}; all layers recomputed"


show(theirs, ours)
