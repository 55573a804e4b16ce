"""Zero bubble with compiled layers.

https://github.com/pytorch/pytorch/issues/161904

ZBVZeroBubble and DualPipeV fail in the backward of a model that went through `torch.compile`, and succeed without it.
"""

from copy import deepcopy

import torch
from museum import batch, compare, eager, equal, gradients, mlp, named, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    copy = deepcopy(model)
    torch_step([torch.compile(layer, backend="aot_eager") for layer in copy], mse_loss, x, y, 4, "ZBVZeroBubble")
    return compare(named(copy), expected)


def ours():
    for schedule in ("ZBVZeroBubble", "DualPipeV"):
        copy, regions = deepcopy(model), []

        def backend(module, examples, regions=regions):  # as `torch.compile(backend=)` takes one
            regions.append(module)
            return module

        pipe = graphpp.compile(copy, mse_loss, split=["1"], schedule=schedule, microbatches=4, backend=backend)
        pipe.step(x, target=y)
        said = equal(gradients(copy), expected, close=1e-6)
        assert regions
    return f"{said}, with compiled regions under both schedules"


show(theirs, ours)
