"""Pipeline parallelism in accelerate, for training.

https://github.com/huggingface/accelerate/issues/3468

accelerate cuts models for inference alone. The thread asks for a pipeline as a first-class feature.
"""

from accelerate import Accelerator, PartialState
from accelerate.inference import prepare_pippy
from museum import batch, eager, equal, mlp, named, ranks, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()
expected = eager(model, mse_loss, x, y, 4)


def accelerate_rank(rank):
    PartialState(cpu=True)
    cut = prepare_pippy(model, split_points=["1"], example_args=(x[:2],), num_chunks=2)
    return cut(x[:4]).requires_grad


def theirs():
    trainable = ranks(accelerate_rank, 2, seconds=20)[1]
    return "right: the output has a gradient" if trainable else "the output of `prepare_pippy` has no gradient"


def ours():
    accelerator = Accelerator(cpu=True)
    pipe = graphpp.compile(model, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["1"], microbatches=4)
    module = pipe.as_module()
    loss = module(x, target=y).loss
    accelerator.backward(loss)
    return f"the loop stays: `loss = module(..).loss`, `accelerator.backward(loss)`; gradients {equal(named(model), expected)}"


show(theirs, ours)
