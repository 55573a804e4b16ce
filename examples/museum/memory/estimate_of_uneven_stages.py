"""The estimate of memory takes the average stage.

https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/5077

For stages of 1, 2, 2 and 3 layers the estimate divides the parameters by the number of ranks. The heaviest rank holds half as
many again, and the job that should fit does not.
"""

from museum import batch, mlp, not_run, refused, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(layers=8, width=32), batch(8, 32)
of_a_layer = 4 * sum(parameter.numel() for parameter in model[0].parameters())


def on_four_ranks(cap=None):
    part = graphpp.Microbatch((x[:2],), target=y[:2])
    memory = graphpp.Memory(cap=cap)
    return graphpp.verify(model, mse_loss, part, split=["1", "3", "5"], schedule="1F1B", microbatches=4, ranks=4, memory=memory)


def theirs():
    return not_run("megatron-bridge")


def ours():
    assert on_four_ranks().ok
    average = 4 * 2 * of_a_layer  # weights, gradients and two states of AdamW of two layers
    return refused(lambda: on_four_ranks(cap=average + 5_000), "bytes are alive here", "more stages on more ranks")


show(theirs, ours)
