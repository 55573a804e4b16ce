"""A scheduler cannot go on after loading.

https://github.com/pytorch/pytorch/issues/140900

A learning-rate scheduler writes `initial_lr` into the optimizer's groups, which is gone after DCP has saved and loaded them.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from museum import batch, mlp, show
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()


def made():
    part = graphpp.Microbatch((x[:2],), target=y[:2])
    pipe = graphpp.compile(mlp(), mse_loss, example=part, split=["2"], microbatches=4)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    return pipe, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def rates(pipe, optimizer, scheduler):
    for _ in range(3):
        pipe.step(x, target=y)
        optimizer.step()
        scheduler.step()
    return scheduler.get_last_lr()


def theirs():
    models = [mlp(), mlp()]
    first, second = (torch.optim.AdamW(model.parameters(), lr=0.1) for model in models)
    torch.optim.lr_scheduler.StepLR(first, 1, 0.5)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"optimizer": get_optimizer_state_dict(models[0], first)}, checkpoint_id=folder, no_dist=True)
        state = {"optimizer": get_optimizer_state_dict(models[1], second)}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_optimizer_state_dict(models[1], second, state["optimizer"])
    torch.optim.lr_scheduler.StepLR(second, 1, 0.5, last_epoch=1)
    return "right: a scheduler goes on"


def ours():
    first, second = made(), made()
    with tempfile.TemporaryDirectory() as folder:
        rates(*first)
        first[0].checkpoint(*first[1:]).save(f"{folder}/run")
        second[0].checkpoint(*second[1:]).load(f"{folder}/run")
    found = rates(*second)
    assert found == rates(*first)
    return f"the scheduler goes on, to {found[0]:.4g} after 6 steps"


show(theirs, ours)
