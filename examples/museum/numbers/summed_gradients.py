"""Gradients are summed over the microbatches, not averaged.

https://github.com/deepspeedai/DeepSpeed/issues/7773

With the same global batch, four times as many microbatches give a gradient norm four times as large, so the learning rate and
the clipping depend on how the batch is cut.
"""

from copy import deepcopy

import torch
from museum import batch, eager, equal, gradients, mlp, not_run, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(), batch(16)


def theirs():
    return not_run("deepspeed")


def ours():
    norms = []
    for microbatches in (2, 8):
        copy = deepcopy(model)
        pipe = graphpp.compile(copy, mse_loss, split=["2"], microbatches=microbatches)
        pipe.step(x, target=y)
        said = equal(gradients(copy), eager(model, mse_loss, x, y, microbatches))
        norms.append(pipe.clip_grad_norm_(float("inf")))
    assert torch.allclose(norms[0], norms[1])
    return f"{said}; norm {norms[0]:.4f} with 2 and {norms[1]:.4f} with 8 microbatches"


show(theirs, ours)
