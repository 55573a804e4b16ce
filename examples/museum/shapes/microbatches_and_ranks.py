"""The number of microbatches is no multiple of the ranks.

https://github.com/pytorch/pytorch/pull/129597

Interleaved schedules require it, so the batch must follow the pipeline. The thread lifts the rule for some numbers.
"""

from museum import batch, compare, eager, equal, mlp, named, own, ranks, refused, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(), batch(10)
expected = eager(model, mse_loss, x, y, 5)


def torch_rank(rank):
    _, mine = torch_step(list(model), mse_loss, x, y, 5, "Interleaved1F1B")
    return named(model, mine)


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1", "2", "3"], schedule="MegatronInterleaved", microbatches=5)
    pipe.step(x, target=y)
    return own(pipe)


def torchs_own_table():
    graphpp.schedules.check(graphpp.schedules.interleaved_1f1b(2, 4, 5), ranks=2, stages=4, microbatches=5)


def theirs():
    first, second = ranks(torch_rank, 2, seconds=15)
    return compare(first | second, expected)


def ours():
    refused(torchs_own_table, "MegatronInterleaved")  # this table is that of torch, rule included; the error names another
    first, second = ranks(our_rank, 2)
    return f"MegatronInterleaved {equal(first | second, expected)}, with 5 microbatches; Interleaved1F1B is refused as in torch"


show(theirs, ours)
