"""The batch is not the first dimension.

https://github.com/pytorch/torchtitan/pull/947

The trainer cuts batches along dimension 0. Inputs of `[length, batch]`, or a cut along the sequence, need another one.
"""

import torch
from museum import equal, gradients, show, torch_pipeline
from torch import nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)


class Summed(nn.Linear):
    def forward(self, x):  # [length, batch, width]: each token sees all earlier ones
        return super().forward(x.cumsum(0)).tanh()


model, x, y = nn.Sequential(Summed(8, 8), Summed(8, 8)), torch.randn(6, 8, 8), torch.randn(6, 8, 8)
for piece, target in zip(x.chunk(4, 1), y.chunk(4, 1), strict=True):
    (mse_loss(model(piece), target) / 4).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    options = {"args_chunk_spec": (TensorChunkSpec(1),)}
    schedule, _ = torch_pipeline(list(model), mse_loss, 4, "Interleaved1F1B", **options)
    schedule.step(x, target=y, losses=[], return_outputs=False)
    found = equal(gradients(model), expected)
    model.zero_grad()
    return f"right: {found}"


def ours():
    model.zero_grad()
    cut = graphpp.Microbatches(4, batch_dims={"input": 1, "target": 1})
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=cut)
    pipe.step(x, target=y)
    return f"{equal(gradients(model), expected)}; inputs and targets are cut along dimension 1"


show(theirs, ours)
