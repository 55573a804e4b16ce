"""Tied embeddings are two parameters after the tracer has cut the model.

https://github.com/pytorch/pytorch/issues/51931

The output layer shares its weight with the embedding, and the two are in different stages. A pipeline must not hold the
weight twice, and must add both gradients. The thread asks for tied layers as DeepSpeed declares them. torch's tracer takes
such a model today.
"""

from copy import deepcopy

import torch
from museum import compare, eager, equal, gradients, show, torch_step
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn import functional as F

import graphpp

torch.manual_seed(0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer, self.head = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.layer(self.embedding(tokens)).tanh())


def loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


model, tokens, labels = Tied(), torch.randint(0, 50, (8, 12)), torch.randint(0, 50, (8, 12))
expected = eager(model, loss, tokens, labels, 4)


def theirs():
    cut = pipeline(deepcopy(model), (tokens[:2],), split_spec={"layer": SplitPoint.BEGINNING})
    parts = [cut.get_stage_module(index) for index in range(2)]
    torch_step(parts, loss, tokens, labels, 4)
    first, second = parts[0].embedding.weight, parts[1].head.weight
    shared = "one parameter" if first is second else "two parameters"
    return f"{compare({'embedding.weight': first.grad}, expected)} ({shared})"


def ours():
    pipe = graphpp.compile(model, loss, split=["layer"], microbatches=4)
    pipe.step(tokens, target=labels)
    return f"{equal(gradients(model), expected, close=1e-6)}, one parameter"


show(theirs, ours)
