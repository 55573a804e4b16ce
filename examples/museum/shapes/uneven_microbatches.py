"""8 rows in 3 microbatches.

https://github.com/pytorch/pytorch/issues/126600

Microbatches of 3, 3 and 2 rows: the first stage cuts them so, later stages keep buffers of 3 rows, and the loss sees other
sizes than the target. The thread asks whether to support or to refuse such a batch.
"""

import torch
from museum import batch, compare, equal, gradients, mlp, named, ranks, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch(8)
mse_loss(model(x), y).backward()  # the mean over the batch
expected = gradients(model)
model.zero_grad()


def torch_rank(rank):
    _, mine = torch_step(list(model), mse_loss, x, y, 3, "1F1B")
    return named(model, mine)


def theirs():
    first, second = ranks(torch_rank, 2, seconds=15)
    return compare(first | second, expected)


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=3, gradients="rows")
    result = pipe.step(x, target=y)
    torch.testing.assert_close(result.loss, mse_loss(model(x), y).detach())
    return f"{equal(gradients(model), expected, close=1e-6)} over the whole batch, weighted by rows"


show(theirs, ours)
