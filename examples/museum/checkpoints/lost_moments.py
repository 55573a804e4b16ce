"""The moments of AdamW start at zero after a resume.

https://github.com/KempnerInstitute/KempnerForge/pull/115

`dcp.load` fills the tensors that it is given. A new optimizer has no moments yet, so its `state_dict()` has no place for
them, and they are dropped without a word.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from museum import batch, mlp, show
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters())
    model(x).square().mean().backward()
    optimizer.step()
    return optimizer


def theirs():
    model = mlp(2)
    optimizer, fresh = stepped(model), torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=folder, no_dist=True)
        state = {"optimizer": fresh.state_dict()}
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        fresh.load_state_dict(state["optimizer"])
    count = len(fresh.state)
    return f"right: {count} states" if count == 4 else f"wrong, silently: {count} of 4 parameters have moments after loading"


def ours():
    model = mlp(2)
    pipe = graphpp.compile(model, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["1"], microbatches=4)
    optimizer, fresh = stepped(model), torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        pipe.checkpoint(optimizer).save(f"{folder}/run")
        pipe.checkpoint(fresh).load(f"{folder}/run")
    for parameter in model.parameters():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(fresh.state[parameter][key], optimizer.state[parameter][key])
    return "the moments of all 4 parameters, bit for bit, in a new optimizer"


show(theirs, ours)
