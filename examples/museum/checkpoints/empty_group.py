"""A group of the optimizer is empty on one stage.

https://github.com/pytorch/pytorch/issues/143828

Norms without decay form a group of their own. A stage without norms has an empty group, and after loading the groups lack
their options, so the next step fails.
"""

import tempfile

import torch
from museum import batch, ranks, show
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, bias=False), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8, bias=False)))


def grouped(named):
    named = list(named)
    decay, plain = ([p for _, p in named if (p.dim() > 1) is matrix] for matrix in (True, False))
    return torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=0.1)


def theirs():
    optimizer = grouped((stage := made()[0]).named_parameters())
    stage(x).sum().backward()
    optimizer.step()
    set_optimizer_state_dict(stage, optimizer, get_optimizer_state_dict(stage, optimizer))
    optimizer.step()
    return "right: the next step runs"


def our_rank(rank, folder):
    pipe = graphpp.compile(made(), mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y)
    optimizer = grouped(pipe.named_parameters())
    optimizer.step()
    for act in ("save", "load"):
        getattr(pipe.checkpoint(optimizer), act)(folder)
    optimizer.step()
    return [len(group["params"]) for group in optimizer.param_groups], [g["weight_decay"] for g in optimizer.param_groups]


def ours():
    with tempfile.TemporaryDirectory() as folder:
        (sizes, decays), (other, _) = ranks(our_rank, 2, f"{folder}/run")
    assert sizes == [1, 0] and other == [1, 2] and decays == [0.1, 0.0]
    return "saved, loaded and stepped with an empty group on rank 0"


show(theirs, ours)
