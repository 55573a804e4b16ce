"""The loss is -1 on the rank that logs.

https://github.com/pytorch/torchtitan/issues/550

The last stage alone knows the loss, and rank 0 writes the log. Under V-shaped schedules it is the other way round.
"""

import torch
from museum import batch, mlp, ranks, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(), batch()
expected = torch.stack([mse_loss(model(piece), target) for piece, target in zip(x.chunk(4), y.chunk(4), strict=True)])


def torch_rank(rank):
    losses, _ = torch_step([model[:2], model[2:]], mse_loss, x, y, 4, "1F1B")
    return len(losses)


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["2"], microbatches=4)
    result = pipe.step(x, target=y)
    return result.loss, result.losses


def theirs():
    first, second = ranks(torch_rank, 2)
    said = f"rank 0 has {first} losses, rank 1 has {second}"
    return f"right: {said}" if first == second else said


def ours():
    for loss, losses in ranks(our_rank, 2):
        assert torch.equal(losses, expected.detach()) and torch.equal(loss, losses.mean())
    return "both ranks have the loss and those of the 4 microbatches, bit for bit"


show(theirs, ours)
