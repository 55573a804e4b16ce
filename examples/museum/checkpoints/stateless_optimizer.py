"""An optimizer without state has some after loading.

https://github.com/pytorch/pytorch/issues/192225

Plain SGD keeps nothing. After a flattened state dict was saved and loaded, its state has an empty entry for each parameter.
"""

import tempfile

import torch
from museum import batch, mlp, show
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()


def theirs():
    model = mlp(2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    saved = get_optimizer_state_dict(model, optimizers[0], options=options)
    set_optimizer_state_dict(model, optimizers[1], saved, options=options)
    count = len(optimizers[1].state_dict()["state"])
    return f"{count} entries of state after loading" if count else "right: no state after loading"


def ours():
    model = mlp(2)
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe.step(x, target=y)
    optimizer.step()
    other = torch.optim.SGD(model.parameters(), lr=0.5)
    with tempfile.TemporaryDirectory() as folder:
        pipe.checkpoint(optimizer).save(f"{folder}/run")
        pipe.checkpoint(other).load(f"{folder}/run")
    assert other.state_dict()["state"] == {} and other.param_groups[0]["lr"] == 0.1
    return "no state after loading, and the saved learning rate"


show(theirs, ours)
