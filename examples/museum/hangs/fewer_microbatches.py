"""Fewer microbatches than stages.

https://github.com/pytorch/torchtitan/issues/775

A run with fewer microbatches than pipeline ranks waits for ever in the warm-up of 1F1B.
"""

import torch
from museum import eager, equal, named, outcomes, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
x, y = torch.randn(4, 8), torch.randn(4, 8)
expected = eager(model, mse_loss, x, y, 1)


def torch_rank(rank):
    _, mine = torch_step(list(model), mse_loss, x, y, 1, "1F1B")
    return named(model, mine)


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="1F1B", microbatches=1)
    pipe.step(x, target=y)
    return {name: p.grad for name, p in pipe.named_parameters()}


def theirs():
    first, second = outcomes(torch_rank, 2, seconds=10)
    failed = [each.text for each in (first, second) if not isinstance(each, dict)]
    return failed[0] if failed else f"right: {equal(first | second, expected)}"


def ours():
    first, second = ranks(our_rank, 2)
    return equal(first | second, expected)


show(theirs, ours)
