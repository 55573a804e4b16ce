"""Activation checkpointing beside a zero-bubble schedule.

https://github.com/pytorch/pytorch/issues/136766

A model that trains under Interleaved1F1B with checkpointed layers runs out of memory under zero bubble: finding the gradients of
inputs and weights apart recomputes a layer for each group of weights.
"""

import torch
from museum import batch, eager, equal, gradients, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import graphpp


class Products(TorchDispatchMode):
    """Counts the forwards of the layers' first products; the results have 32 columns."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        self.count += operator is torch.ops.aten.addmm.default and result.shape == (2, 32)
        return result


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Checkpointed(nn.Sequential):
    def forward(self, x):
        return checkpoint(self[0], x, use_reentrant=False)


torch.manual_seed(0)
model, (x, y) = nn.Sequential(Layer(), Layer()), batch()
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    found = []
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        with Products() as products:
            torch_step([Checkpointed(layer) for layer in model], mse_loss, x, y, 4, schedule)
        found.append(f"{products.count / 8:.2f} under {schedule}")
        model.zero_grad()
    return f"forwards of a layer for each microbatch, those of a trial run included: {', '.join(found)}"


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="ZBVZeroBubble", microbatches=4, memory="full")
    pipe.prepare(x, target=y)
    with Products() as products:
        pipe.step(x, target=y)
    assert products.count == 16, products.count
    return f"{equal(gradients(model), expected)}; 2 forwards of a layer for each microbatch under ZBVZeroBubble"


if __name__ == "__main__":
    show(theirs, ours)
