"""An optimizer that steps inside the backward.

https://github.com/pytorch/torchtitan/issues/777

A hook updates each parameter as soon as its gradient is there, which frees the gradient. Over microbatches the hook runs too
early; torchtitan fails with several model parts, and later refuses the combination.
"""

from copy import deepcopy

import torch
from museum import batch, compare, equal, mlp, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch()
plain = deepcopy(model)
for piece, target in zip(x.chunk(4), y.chunk(4), strict=True):
    (mse_loss(plain(piece), target) / 4).backward()
torch.optim.SGD(plain.parameters(), lr=0.1).step()
expected = dict(plain.named_parameters())


def with_hooks(model, calls):
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def update(parameter):
        calls.append(parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)


def theirs():
    copy, calls = deepcopy(model), []
    with_hooks(copy, calls)
    torch_step(list(copy), mse_loss, x, y, 4)
    outcome = compare(dict(copy.named_parameters()), expected).replace("eager", "one update by the whole gradient")
    return f"{outcome} ({len(calls)} updates of 4 parameters)"


def ours():
    copy, calls = deepcopy(model), []
    with_hooks(copy, calls)
    pipe = graphpp.compile(copy, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y)
    assert len(calls) == 4 and all(parameter.grad is None for parameter in copy.parameters())
    return f"parameters {equal(dict(copy.named_parameters()), expected)}; one update of each, no gradient is left"


show(theirs, ours)
