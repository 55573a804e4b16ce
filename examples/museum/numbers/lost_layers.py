"""Layers that do not divide by the stages are lost.

https://github.com/NVIDIA/Megatron-LM/issues/1304

30 layers on 4 ranks become 7 layers a rank. Two layers of the model are never built, and nothing says so.
"""

from museum import batch, eager, equal, gradients, mlp, not_run, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(layers=10), batch()


def theirs():
    return not_run("megatron-core")


def ours():
    pipe = graphpp.compile(model, mse_loss, split=4, microbatches=4)
    pipe.step(x, target=y)
    said = equal(gradients(model), eager(model, mse_loss, x, y, 4))
    names = [name for stage in range(4) for name in pipe.programs(stage).parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    return f"{said}; 4 stages hold all 10 layers"


show(theirs, ours)
