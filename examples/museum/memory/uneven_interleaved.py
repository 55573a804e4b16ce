"""Uneven stages under an interleaved schedule.

https://github.com/NVIDIA/Megatron-LM/issues/1303

40 layers do not divide by 16 ranks. The numbers of layers of the first and the last stage can be set, but not together with
the interleaved schedule.
"""

from museum import batch, eager, equal, gradients, mlp, not_run, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(layers=7), batch()


def theirs():
    return not_run("megatron-core")


def ours():
    starts = ["1", "3", "6"]  # 1, 2, 3 and 1 layers
    part = graphpp.Microbatch((x[:2],), target=y[:2])
    checked = graphpp.verify(model, mse_loss, part, split=starts, schedule="Interleaved1F1B", microbatches=4, ranks=2)
    assert checked.ok, checked
    pipe = graphpp.compile(model, mse_loss, split=starts, schedule="Interleaved1F1B", microbatches=4)
    pipe.step(x, target=y)
    return f"{equal(gradients(model), eager(model, mse_loss, x, y, 4))}: stages of 1, 2, 3 and 1 layers"


show(theirs, ours)
