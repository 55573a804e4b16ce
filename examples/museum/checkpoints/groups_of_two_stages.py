"""The optimizer's groups of two stages have one name.

https://github.com/pytorch/pytorch/pull/127071

`param_groups` is a list, so all stages' learning rates have one name in a checkpoint, and one stage overwrites another.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from museum import batch, mlp, ranks, show
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss

import graphpp

(x, y), RATES = batch(), [0.1, 0.02]  # the learning rates of two stages


def by_stage(named):
    parts = [[p for name, p in named if int(name[0]) // 2 == stage] for stage in range(2)]
    return torch.optim.AdamW([{"params": part, "lr": rate} for rate, part in zip(RATES, parts, strict=True) if part])


def torch_rank(rank, folder):
    optimizer = torch.optim.AdamW((part := mlp()[2 * rank : 2 * rank + 2]).parameters(), lr=RATES[rank])
    dcp.save({"optimizer": get_optimizer_state_dict(part, optimizer)}, checkpoint_id=folder)


def made(split):
    part = graphpp.Microbatch((x[:2],), target=y[:2])
    pipe = graphpp.compile(mlp(), mse_loss, example=part, split=[split], microbatches=4)
    return pipe, by_stage(list(pipe.named_parameters()))


def theirs():
    with tempfile.TemporaryDirectory() as folder:
        ranks(torch_rank, 2, folder)
        optimizer = by_stage(list((model := mlp()).named_parameters()))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        try:
            dcp.load(state, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            return f"loading raises {error.failures[0][0]}"
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return f"learning rates {[group.get('lr') for group in optimizer.param_groups]} after loading"


def ours():
    with tempfile.TemporaryDirectory() as folder:
        ranks(lambda rank: (pair := made("2"))[0].checkpoint(pair[1]).save(f"{folder}/run"), 2)
        pipe, optimizer = made("1")
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0
        pipe.checkpoint(optimizer).load(f"{folder}/run")
    assert [group["lr"] for group in optimizer.param_groups] == RATES
    return "both learning rates, by parameter, in another layout"


show(theirs, ours)
