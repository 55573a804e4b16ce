"""Microbatches of different lengths in one step.

https://github.com/pytorch/torchtitan/issues/431

Fine-tuning data without padding gives each microbatch a length of its own. torch's stages expect one shape.
"""

import torch
from museum import compare, equal, gradients, named, ranks, show, torch_pipeline
from torch import nn
from torch.nn.functional import cross_entropy

import graphpp

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
lengths = (12, 3, 7, 5)
packed = [torch.randint(0, 20, (1, length)) for length in lengths]


def loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / sum(lengths)


for tokens in packed:
    loss(model(tokens), tokens).backward()
expected = gradients(model)
model.zero_grad()


def torch_rank(rank):
    schedule, mine = torch_pipeline(list(model), loss, 4, "1F1B", scale_grads=False)
    schedule._stage.has_backward = True  # as `step` does, which cuts one tensor and so takes one length
    schedule._step_microbatches([() if rank else (tokens,) for tokens in packed], [{}] * 4, packed, [])
    return named(model, mine)


def theirs():
    first, second = ranks(torch_rank, 2, seconds=15)
    return compare(first | second, expected)


def ours():
    pipe = graphpp.compile(model, loss, split=["1"], gradients="sum")
    pipe.step_microbatches([graphpp.Microbatch((tokens,), target=tokens) for tokens in packed])
    return f"{equal(gradients(model), expected)}, for microbatches of 12, 3, 7 and 5 tokens"


show(theirs, ours)
