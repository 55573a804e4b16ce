"""Microbatches with different numbers of valid tokens.

https://github.com/pytorch/torchtitan/pull/2206

The loss of a microbatch is the mean over its own valid tokens. Averaged over the microbatches, tokens of short rows count
more, and the loss is not that of the batch.
"""

import torch
from museum import compare, equal, gradients, named, show, torch_step
from torch import nn
from torch.nn.functional import cross_entropy

import graphpp

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
tokens = torch.randint(0, 20, (8, 12))
lengths = torch.tensor([12, 11, 2, 1, 7, 5, 1, 1])
labels = torch.where(torch.arange(12) < lengths[:, None], tokens.roll(-1, 1), -100)


def loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


loss(model(tokens), labels).backward()  # the whole batch at once
expected = gradients(model)
model.zero_grad()


def theirs():
    torch_step(list(model), loss, tokens, labels, 4)
    outcome = compare(named(model), expected)
    model.zero_grad()
    return outcome


def ours():
    pipe = graphpp.compile(model, loss, split=["1"], microbatches=4)
    valid = torch.stack([(part != -100).sum() for part in labels.chunk(4)])
    pipe.step(tokens, target=labels, loss_weight=valid / valid.sum())
    return f"with `loss_weight`, {equal(gradients(model), expected, close=1e-6)} over the whole batch"


show(theirs, ours)
