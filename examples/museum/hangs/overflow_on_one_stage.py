"""A gradient overflows on one stage only.

https://github.com/hpcaitech/ColossalAI/pull/1175

In half precision each rank looks for infinities in its own gradients. The rank with the overflow skips clipping and update, the
other one waits in the all-reduce of the norm.
"""

import torch
import torch.distributed as dist
from museum import Failure, batch, outcomes, ranks, show, torch_step
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        return x @ (self.weight * 1e-36)


model, (x, y) = nn.Sequential(Small(), nn.Linear(8, 8)), batch()
x = x * 1e36  # the scaled gradient of the first stage overflows, that of the second does not


def torch_rank(rank):
    torch_step(list(model), lambda output, target: mse_loss(output, target) * 2.0**16, x, y, 4, "1F1B")
    found = [parameter.grad for parameter in model[rank].parameters()]
    if not all(gradient.isfinite().all() for gradient in found):
        return "skips"
    dist.all_reduce(torch.stack([gradient.norm() for gradient in found]).norm().square())
    return "updates"


def our_rank(rank):
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    scaler = torch.amp.GradScaler("cpu")
    pipe.step(x, target=y, scaler=scaler)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    scaler.unscale_(optimizer)
    pipe.clip_grad_norm_(1.0)
    scaler.step(optimizer)
    scaler.update()
    return all(torch.equal(value, before[name]) for name, value in pipe.state_dict().items()), scaler.get_scale()


def theirs():
    found = [each.text if isinstance(each, Failure) else each for each in outcomes(torch_rank, 2, seconds=8)]
    return f"rank 0 {found[0]}, rank 1 {found[1]}"


def ours():
    assert ranks(our_rank, 2) == [(True, 2.0**15)] * 2
    return "both ranks skip the update, and halve the scale"


if __name__ == "__main__":
    show(theirs, ours)
