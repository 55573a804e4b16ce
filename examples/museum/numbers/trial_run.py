"""A stage runs once on memory that nobody wrote.

https://github.com/pytorch/pytorch/issues/167425

To find the shapes of messages, a stage without given shapes calls the next module on made-up tensors before the first step.
The reader of that line wonders whether this is right. A batch norm counts the call, and keeps its statistics.
"""

from copy import deepcopy

import torch
from museum import batch, equal, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(2)))
x, y = batch(16)
plain = deepcopy(model)
for piece in x.chunk(4):
    plain(piece)
expected = dict(plain.named_buffers())


def torch_rank(rank):
    torch_step(list(model), mse_loss, x, y, 4, "1F1B")
    return {f"{rank}.{name}": value for name, value in model[rank].named_buffers()}


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y)
    return dict(pipe.named_buffers())


def theirs():
    first, second = ranks(torch_rank, 2)
    count = (first | second)["1.1.num_batches_tracked"]
    mean = (first | second)["1.1.running_mean"].abs().max()
    said = f"the second stage's batch norm counts {count} of 4 microbatches; largest running mean {mean:.2g}"
    return f"right: {said}" if count == 4 else f"wrong, silently: {said}"


def ours():
    first, second = ranks(our_rank, 2)
    return f"statistics {equal(first | second, expected)}"


show(theirs, ours)
