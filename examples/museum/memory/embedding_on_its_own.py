"""The first and the last rank hold a third more.

https://github.com/deepspeedai/DeepSpeed/issues/1378

The embedding and the head come on top of a layer, so the outer ranks need more memory than all others. The author wants
stages for the embedding and for the head alone.
"""

import torch
from museum import equal, gradients, not_run, show
from torch import nn
from torch.nn.functional import cross_entropy

import graphpp

torch.manual_seed(0)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))
        self.head = nn.Linear(16, 100)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def loss(logits, labels):
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


model, tokens = Model(), torch.randint(0, 100, (8, 12))
for piece in tokens.chunk(4):
    (loss(model(piece), piece) / 4).backward()
expected = gradients(model)
model.zero_grad()


def theirs():
    return not_run("deepspeed")


def ours():
    pipe = graphpp.compile(model, loss, split=graphpp.Layout("E|t*4|t*4|L"), microbatches=4)
    pipe.step(tokens, target=tokens)
    held = [sorted({name.split(".")[0] for name in pipe.programs(stage).parameters}) for stage in range(4)]
    assert held == [["embedding"], ["layers"], ["layers"], ["head"]], held
    return f"{equal(gradients(model), expected)}; four stages: embedding, 4 layers, 4 layers, head"


show(theirs, ours)
