"""Each rank keeps the whole model.

https://github.com/pytorch/PiPPy/issues/723

Every rank loads all layers and computes with some of them. The thread asks to hold only those of the rank.
"""

import torch
from museum import batch, mlp, ranks, show
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn.functional import mse_loss

import graphpp

x, y = batch(8, 64)


def alive(model):
    return sum(p.untyped_storage().nbytes() for p in model.parameters() if not p.is_meta)


def torch_rank(rank):
    model = mlp(4, 64)
    before = alive(model)
    cut = pipeline(model, (x[:2],), split_spec={"2": SplitPoint.BEGINNING})
    stage = cut.build_stage(rank, torch.device("cpu"))
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in cut.split_gm.parameters()}
    assert stage.submod is not None
    return before, sum(held.values())


def our_rank(rank):
    model = mlp(4, 64)
    before = alive(model)
    pipe = graphpp.compile(model, mse_loss, split=["2"], microbatches=4)
    pipe.step(x, target=y)
    return before, alive(model)


def theirs():
    before, after = ranks(torch_rank, 2)[0]
    said = f"{after:,} of {before:,} bytes of parameters on a rank while the traced pipeline lives"
    return said if after == before else f"right: {said}"


def ours():
    (before, first), (_, second) = ranks(our_rank, 2)
    assert first == second == before / 2
    return f"{first:,} of {before:,} bytes of parameters on each rank, after the first step"


show(theirs, ours)
