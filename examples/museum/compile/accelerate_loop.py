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
    output = cut(x[:4])  # on the last rank
    if output is not None:
        mse_loss(output, y[:4]).backward()
    return [parameter.grad is not None for parameter in cut.pippy_stage._stage.submod.parameters()]


def theirs():
    first, second = ranks(accelerate_rank, 2, seconds=20)
    said = f"after `backward` {sum(second)} parameters of the last stage have gradients, and {sum(first)} of the first"
    return f"right: {said}" if all(first) else said


def ours():
    accelerator = Accelerator(cpu=True)
    pipe = graphpp.compile(model, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["1"], microbatches=4)
    module = pipe.as_module()
    loss = module(x, target=y).loss
    accelerator.backward(loss)
    return f"the loop stays: `loss = module(..).loss`, `accelerator.backward(loss)`; gradients {equal(named(model), expected)}"


show(theirs, ours)
