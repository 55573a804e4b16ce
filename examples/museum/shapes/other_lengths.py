"""Lengths that differ from step to step.

https://github.com/pytorch/pytorch/issues/159942

The thread asks for dynamic shapes between stages. The answer: possible in principle, with sizes sent ahead of each step, and
not done.
"""

import torch
from museum import compare, equal, gradients, named, ranks, show, torch_pipeline
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
batches = [(torch.randn(8, length, 8), torch.randn(8, length, 8)) for length in (5, 9, 7)]
for x, y in batches:
    for piece, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (mse_loss(model(piece), target) / 4).backward()
expected = gradients(model)
model.zero_grad()


def torch_rank(rank):
    schedule, mine = torch_pipeline(list(model), mse_loss, 4, "1F1B")
    for x, y in batches:
        schedule.step(*((x,) if rank == 0 else ()), **({"target": y, "losses": []} if rank else {}))
    return named(model, mine)


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    for x, y in batches:
        pipe.step(x, target=y)
    return {name: parameter.grad for name, parameter in pipe.named_parameters()}


def theirs():
    first, second = ranks(torch_rank, 2, seconds=15)
    return compare(first | second, expected)


def ours():
    first, second = ranks(our_rank, 2)
    return f"{equal(first | second, expected)}, over steps of 5, 9 and 7 tokens"


show(theirs, ours)
