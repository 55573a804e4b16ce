"""Gradients of earlier steps are thrown away when shapes change.

https://github.com/NVIDIA-NeMo/Automodel/pull/3530

For a batch of another length the stages are initialised again, and the initialisation clears `param.grad`. Under gradient
accumulation only the last batch trains the model; the loss looks right.
"""

import torch
from museum import compare, equal, gradients, named, show, torch_pipeline
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2)))
batches = [(torch.randn(8, length, 8), torch.randn(8, length, 8)) for length in (6, 9)]
for x, y in batches:
    for piece, target in zip(x.chunk(4), y.chunk(4), strict=True):
        (mse_loss(model(piece), target) / 4).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    schedule, _ = torch_pipeline(list(model), mse_loss, 4)
    for x, y in batches:
        schedule._stages_forward_initialized = schedule._stages_backward_initialized = False  # as that trainer does
        schedule.step(x, target=y)
    outcome = compare(named(model), expected)
    model.zero_grad()
    return outcome


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], microbatches=4)
    for x, y in batches:
        pipe.step(x, target=y)
    return f"{equal(gradients(model), expected)}, accumulated over both lengths"


show(theirs, ours)
