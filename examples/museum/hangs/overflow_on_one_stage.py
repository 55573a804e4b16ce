"""A gradient overflows on one stage only.

https://github.com/hpcaitech/ColossalAI/pull/1175

In half precision each rank looks for infinities in its own gradients. The rank with the overflow skips clipping and update,
the other one waits in the all-reduce of the norm.
"""

import torch
import torch.distributed as dist
from museum import Failure, batch, outcomes, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Small(nn.Linear):
    def forward(self, x):
        return x @ (self.weight * 1e-36)


model, (x, y) = nn.Sequential(Small(8, 8, bias=False), nn.Linear(8, 8)), batch()
x = x * 1e36  # so the scaled gradient of the first stage alone overflows


def torch_rank(rank):
    torch_step(list(model), lambda output, target: mse_loss(output, target) * 2.0**16, x, y, 4, "1F1B")
    norm = torch.stack([parameter.grad.norm() for parameter in model[rank].parameters()]).norm()
    if norm.isfinite():
        dist.all_reduce(norm.square())
    return "updates" if norm.isfinite() else "skips"


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    pipe.step(x, target=y, scaler=(scaler := torch.amp.GradScaler("cpu")))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in pipe.parameters()]
    scaler.unscale_(optimizer)
    pipe.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    return all(map(torch.equal, pipe.parameters(), before)), scaler.get_scale()


def theirs():
    first, second = (each.text if isinstance(each, Failure) else each for each in outcomes(torch_rank, 2, seconds=8))
    return f"rank 0 {first}, rank 1 {second}"


def ours():
    assert ranks(our_rank, 2) == [(True, 2.0**15)] * 2
    return "both ranks skip the update, and halve the scale"


show(theirs, ours)
