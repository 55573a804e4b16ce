"""Activation checkpointing beside a zero-bubble schedule.

https://github.com/pytorch/pytorch/issues/136766

A model that trains under Interleaved1F1B with checkpointed layers runs out of memory under zero bubble: finding the gradients of
inputs and weights apart recomputes a layer for each group of weights.
"""

import torch
from museum import batch, eager, equal, gradients, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

import graphpp

runs = [0]


@torch.library.custom_op("museum::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    runs[0] += 1
    return x.clone()


counted.register_fake(lambda x: torch.empty_like(x))
counted.register_autograd(lambda ctx, gradient: gradient)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(counted(self.up(x)).tanh())


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(self[0], x, use_reentrant=False)


torch.manual_seed(0)
model, (x, y) = nn.Sequential(Layer(), Layer()), batch()
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    found = []
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        runs[0] = 0
        torch_step([Checkpointed(layer) for layer in model], mse_loss, x, y, 4, schedule)
        found.append(f"{(runs[0] - 1) / 8:.1f} under {schedule}")
        model.zero_grad()
    return f"forwards of a layer for each microbatch: {', '.join(found)}"


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="ZBVZeroBubble", microbatches=4, memory="full")
    pipe.prepare(x, target=y)
    runs[0] = 0
    pipe.step(x, target=y)
    assert runs[0] == 16
    return f"{equal(gradients(model), expected)}; 2 forwards of a layer for each microbatch under ZBVZeroBubble"


if __name__ == "__main__":
    show(theirs, ours)
