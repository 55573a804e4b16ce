"""Resume with another pipeline.

https://github.com/huggingface/nanotron/issues/38

A training on 4 stages should go on with 2. The optimizer's states are cut by the stages of the first run.
"""

import tempfile

import torch
from museum import batch, mlp, not_run, ranks, show
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()


def training(split, schedule):
    example = graphpp.Microbatch((x[:2],), target=y[:2])
    pipe = graphpp.compile(mlp(), mse_loss, example=example, split=split, schedule=schedule, microbatches=4)
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def steps(pipe, optimizer, count):
    losses = []
    for _ in range(count):
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def our_rank(rank, folder):
    pipe, optimizer = training(["2"], "1F1B")
    steps(pipe, optimizer, 2)
    pipe.checkpoint(optimizer).save(folder)
    return steps(pipe, optimizer, 2)


def theirs():
    return not_run("nanotron")


def ours():
    with tempfile.TemporaryDirectory() as folder:
        expected = ranks(our_rank, 2, f"{folder}/run")[0]
        pipe, optimizer = training(["1", "2", "3"], "Interleaved1F1B")
        pipe.checkpoint(optimizer).load(f"{folder}/run")
        assert steps(pipe, optimizer, 2) == expected
    return "saved by 2 ranks of 1F1B, resumed by 4 stages of Interleaved1F1B in one process: the same bits"


show(theirs, ours)
