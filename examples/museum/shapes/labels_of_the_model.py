"""Labels are an argument of the model.

https://github.com/pytorch/pytorch/pull/128115

A model that computes its loss reads `labels` in the last stage. A traced pipeline has no way to pass them there.
"""

import torch
from museum import compare, equal, gradients, ranks, show
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline
from torch.nn.functional import cross_entropy

import graphpp

torch.manual_seed(0)


class Output(dict):
    loss = property(lambda self: self["loss"])


class Model(nn.Module):
    def __init__(self, wrap=Output):
        super().__init__()
        self.embedding, self.head, self.wrap = nn.Embedding(20, 8), nn.Linear(8, 20), wrap

    def forward(self, tokens, labels):
        return self.wrap(loss=cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), labels.flatten()))


model, bare, tokens = Model(), Model(lambda loss: loss), torch.randint(0, 20, (8, 6))
bare.load_state_dict(model.state_dict())
labels = tokens.roll(1, 1)
for part, target in zip(tokens.chunk(4), labels.chunk(4), strict=True):
    (bare(part, target) / 4).backward()
expected = gradients(bare)
bare.zero_grad()


def torch_rank(rank):
    cut = pipeline(bare, (), {"tokens": tokens[:2], "labels": labels[:2]}, split_spec={"head": SplitPoint.BEGINNING})
    stage = cut.build_stage(rank, torch.device("cpu"))
    inputs = {"labels": labels, "target": labels, "losses": []} if rank else {"tokens": tokens}
    Schedule1F1B(stage, 4, loss_fn=lambda loss, _: loss).step(**inputs)
    return gradients(stage.submod)


def theirs():
    return compare({name: value for each in ranks(torch_rank, 2, seconds=20) for name, value in each.items()}, expected)


def ours():
    torch.utils._pytree.register_pytree_node(Output, lambda d: ([d["loss"]], None), lambda v, _: Output(loss=v[0]))
    pipe = graphpp.compile(model, split=["head"], microbatches=4)
    pipe.step(tokens, labels=labels)
    return equal(gradients(model), expected)


show(theirs, ours)
