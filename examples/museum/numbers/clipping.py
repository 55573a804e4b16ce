"""Gradient clipping by the norm of one stage.

https://github.com/pytorch/torchtitan/issues/596

`clip_grad_norm_` of torch sees the parameters of this rank alone. So each stage clips by a norm of its own, and the direction
of the update changes.
"""

import torch
from museum import batch, compare, eager, equal, mlp, named, own, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

MOST = 1e-2
model, (x, y) = mlp(), batch()
expected = eager(model, mse_loss, x, y, 4)
norm = torch.cat([value.flatten() for value in expected.values()]).norm()
expected = {name: value * (MOST / (norm + 1e-6)) for name, value in expected.items()}


def torch_rank(rank):
    parts = [model[:2], model[2:]]
    torch_step(parts, mse_loss, x, y, 4, "1F1B")
    nn.utils.clip_grad_norm_(parts[rank].parameters(), MOST)
    return named(model, [2 * rank, 2 * rank + 1])


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["2"], microbatches=4)
    pipe.step(x, target=y)
    total = pipe.clip_grad_norm_(MOST)
    return own(pipe) | {"norm": total}


def theirs():
    first, second = ranks(torch_rank, 2)
    return compare(first | second, expected)


def ours():
    first, second = ranks(our_rank, 2)
    assert torch.equal(first["norm"], second["norm"])
    return f"{equal(first | second, expected | {'norm': norm}, close=1e-6)}, by the norm of the whole model"


show(theirs, ours)
