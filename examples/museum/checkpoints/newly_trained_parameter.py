"""A parameter has no state in the checkpoint.

https://github.com/pytorch/pytorch/issues/192224

A layer that was frozen in the first run is trained in the second. Loading a flattened state dict ends with "float() argument
must be a string or a real number, not 'dict'".
"""

import tempfile

import torch
from museum import batch, mlp, refused, show
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()


def made(frozen):
    model = mlp(2)
    model[1].requires_grad_(not frozen)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def theirs():
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    (model, optimizer), (other, second) = made(True), made(False)
    model(x).sum().backward()
    optimizer.step()
    set_optimizer_state_dict(other, second, get_optimizer_state_dict(model, optimizer, options=options), options=options)
    return "right: loaded"


def ours():
    (model, optimizer), (other, second) = made(True), made(False)
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y)
    optimizer.step()
    later = graphpp.compile(other, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["1"], microbatches=4)
    with tempfile.TemporaryDirectory() as folder:
        pipe.checkpoint(optimizer).save(f"{folder}/run")
        return refused(lambda: later.checkpoint(second).load(f"{folder}/run"), "1.0.")


show(theirs, ours)
