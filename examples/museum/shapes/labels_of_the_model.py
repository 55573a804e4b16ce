"""Labels are an argument of the model.

https://github.com/pytorch/pytorch/pull/128115

A model that computes its loss reads `labels` in the last stage. A traced pipeline has a place for them there, and no way to
pass them.
"""

import torch
from museum import compare, equal, gradients, show, torch_pipeline
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn.functional import cross_entropy

import graphpp

torch.manual_seed(0)


class Output(dict):
    loss = property(lambda self: self["loss"])


class Model(nn.Module):
    def __init__(self, bare=False):
        super().__init__()
        self.embedding, self.head, self.bare = nn.Embedding(20, 8), nn.Linear(8, 20), bare

    def forward(self, tokens, labels):
        loss = cross_entropy(self.head(self.embedding(tokens)).flatten(0, 1), labels.flatten())
        return loss if self.bare else Output(loss=loss)


model, bare, tokens = Model(), Model(bare=True), torch.randint(0, 20, (8, 6))
bare.load_state_dict(model.state_dict())
for part in tokens.chunk(4):
    (bare(part, part.roll(1)) / 4).backward()
expected = gradients(bare)
bare.zero_grad()
labels = torch.cat([part.roll(1) for part in tokens.chunk(4)])


def theirs():
    cut = pipeline(bare, (), {"tokens": tokens[:2], "labels": labels[:2]}, split_spec={"head": SplitPoint.BEGINNING})
    parts = [cut.get_stage_module(index) for index in range(2)]
    schedule, _ = torch_pipeline(parts, lambda loss, _: loss, 4, "Interleaved1F1B")
    schedule.step(tokens=tokens, labels=labels, target=labels, losses=[], return_outputs=False)
    return compare(gradients(parts[0]) | gradients(parts[1]), expected)


def ours():
    torch.utils._pytree.register_pytree_node(Output, lambda d: ([d["loss"]], None), lambda v, _: Output(loss=v[0]))
    pipe = graphpp.compile(model, split=["head"], microbatches=4)
    pipe.step(tokens, labels=labels)
    return equal(gradients(model), expected)


show(theirs, ours)
