"""Pipeline parallelism in accelerate, for training.

https://github.com/huggingface/accelerate/issues/3468

accelerate cuts models for inference alone. The thread asks for a pipeline as a first-class feature.
"""

from copy import deepcopy

import torch
from accelerate import Accelerator
from accelerate.inference import prepare_pippy
from museum import batch, eager, equal, mlp, named, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    torch_step(list(deepcopy(model)), mse_loss, x, y, 4)  # makes the process group of one rank
    cut = prepare_pippy(deepcopy(model), split_points=["1"], example_args=(x[:2],), num_chunks=1)
    output = cut(x[:2])
    trainable = torch.is_tensor(output) and output.requires_grad
    return "right: the output has a gradient" if trainable else "the output of `prepare_pippy` has no gradient"


def ours():
    accelerator = Accelerator(cpu=True)
    pipe = graphpp.compile(model, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["1"], microbatches=4)
    module = pipe.as_module()
    loss = module(x, target=y).loss
    accelerator.backward(loss)
    return f"the loop stays: `loss = module(..).loss`, `accelerator.backward(loss)`; gradients {equal(named(model), expected)}"


if __name__ == "__main__":
    show(theirs, ours)
