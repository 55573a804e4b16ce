"""The first values of the parameters depend on the layout.

https://github.com/pytorch/torchtitan/issues/514

Each stage initialises its own part with a seed of its own, so runs with and without a pipeline start from different values.
To compare loss curves, a "seed checkpoint" must be written by one process and loaded by all others. The thread closes with
the words that an equal initialisation is practically impossible.
"""

from copy import deepcopy

import torch
from museum import batch, compare, equal, mlp, ranks, show
from torch.nn.functional import mse_loss

import graphpp

with torch.device("meta"):
    empty = mlp()
x, y = batch()


def values(model, seed):
    torch.manual_seed(seed)
    model.to_empty(device="cpu").apply(lambda module: getattr(module, "reset_parameters", int)())
    return dict(model.state_dict())


expected = values(deepcopy(empty), 0)


def our_rank(rank):
    pipe = graphpp.compile(empty, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["2"], microbatches=4)
    torch.manual_seed(0)
    pipe.materialize()
    return pipe.state_dict()


def theirs():
    by_stage = values(deepcopy(empty[:2]), 0) | values(deepcopy(empty[2:]), 1)
    return compare(by_stage, expected).replace("eager", "one process")


def ours():
    first, second = ranks(our_rank, 2)
    assert len(first) == len(second) == 4  # each rank has made its own half
    return equal(first | second, expected).replace("eager", "one process")


show(theirs, ours)
