"""Layers of a later stage are numbered from 0.

https://github.com/pytorch/torchtitan/pull/4248

A stage that keeps some layers of a `ModuleList` renumbers them. The names of two stages collide in the checkpoint: the last
writer wins, and the layers of one stage are lost without an error.
"""

import tempfile
from pathlib import Path

import torch.distributed.checkpoint as dcp
from museum import batch, mlp, ranks, show
from safetensors import safe_open
from torch import nn
from torch.nn.functional import mse_loss

import graphpp

whole, (x, y) = mlp(), batch()


def torch_rank(rank, folder):
    stage = nn.Sequential(*list(whole)[2 * rank : 2 * rank + 2])  # as a list of layers is cut by hand
    dcp.save({"model": stage.state_dict()}, checkpoint_id=folder)


def our_rank(rank, folder):
    pipe = graphpp.compile(mlp(), mse_loss, split=["2"], microbatches=4)
    pipe.step(x, target=y)
    pipe.save_weights(folder)


def theirs():
    with tempfile.TemporaryDirectory() as folder:
        ranks(torch_rank, 2, folder)
        names = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    said = f"{len(names)} tensors in the checkpoint of a model of {len(whole.state_dict())}"
    return f"right: {said}" if len(names) == len(whole.state_dict()) else f"wrong, silently: {said}"


def ours():
    with tempfile.TemporaryDirectory() as folder:
        ranks(our_rank, 2, f"{folder}/weights")
        names = set()
        for file in sorted(Path(folder, "weights").glob("*.safetensors")):
            with safe_open(file, "pt") as opened:
                names |= set(opened.keys())
    assert names == set(whole.state_dict())
    return "all 8 tensors, under the names of the model"


show(theirs, ours)
