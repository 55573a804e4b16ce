"""Results depend on the number of partitions.

https://github.com/pytorch/pytorch/issues/55036

With one seed, a transformer in 1, 2 or 4 partitions, or with other numbers of chunks, trains differently: stages draw their
dropout masks in the order in which they happen to run.
"""

from copy import deepcopy

import torch
from museum import batch, compare, eager, equal, gradients, named, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh()) for _ in range(4)))
x, y = batch()


def torch_rank(rank):
    torch.manual_seed(1)
    _, mine = torch_step([model[:2], model[2:]], mse_loss, x, y, 4, "1F1B")
    return named(model, [2 * index + each for index in mine for each in (0, 1)])


def theirs():
    torch.manual_seed(1)
    one_process = eager(model, mse_loss, x, y, 4)
    first, second = ranks(torch_rank, 2)
    return compare(first | second, one_process)


def ours():
    found = []
    for split, schedule in ([], "auto"), (["2"], "1F1B"), (["1", "2", "3"], "Interleaved1F1B"), (["2"], "ZBVZeroBubble"):
        copy = deepcopy(model)
        pipe = graphpp.compile(copy, mse_loss, split=split or 1, schedule=schedule, microbatches=4)
        torch.manual_seed(1)
        pipe.step(x, target=y)
        found.append(gradients(copy))
    for other in found[1:]:
        equal(other, found[0])
    return "1, 2 and 4 stages, three schedules: the same bits"


show(theirs, ours)
