"""The optimizer's groups of two stages have one name.

https://github.com/pytorch/pytorch/pull/127071

`param_groups` is a list, so the learning rates of all stages are saved under the same keys. One stage overwrites another, and a
group has no learning rate after loading. Flattening was added as an option.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from museum import batch, mlp, ranks, show
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import mse_loss

import graphpp

x, y = batch()
RATES = {0: 0.1, 1: 0.02}  # by stage


def by_stage(named):
    parts = {stage: [p for name, p in named if int(name[0]) // 2 == stage] for stage in RATES}
    return torch.optim.AdamW([{"params": part, "lr": RATES[stage]} for stage, part in parts.items() if part])


def torch_rank(rank, folder):
    part = mlp()[2 * rank : 2 * rank + 2]
    optimizer = torch.optim.AdamW(part.parameters(), lr=RATES[rank])
    part(x).sum().backward()
    optimizer.step()
    dcp.save({"optimizer": get_optimizer_state_dict(part, optimizer)}, checkpoint_id=folder)


def our_rank(rank, folder):
    pipe = graphpp.compile(mlp(), mse_loss, split=["2"], microbatches=4)
    pipe.step(x, target=y)
    optimizer = by_stage(list(pipe.named_parameters()))
    optimizer.step()
    pipe.checkpoint(optimizer).save(folder)


def theirs():
    with tempfile.TemporaryDirectory() as folder:
        ranks(torch_rank, 2, folder)
        model = mlp()
        optimizer = by_stage(list(model.named_parameters()))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        try:
            dcp.load(state, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            return f"loading raises {error.failures[0][0]}"
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found = [group.get("lr") for group in optimizer.param_groups]
    return f"{'right: ' if found == list(RATES.values()) else ''}learning rates {found} after loading, {list(RATES.values())} saved"


def ours():
    with tempfile.TemporaryDirectory() as folder:
        ranks(our_rank, 2, f"{folder}/run")
        pipe = graphpp.compile(mlp(), mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["1"], microbatches=4)
        optimizer = by_stage(list(pipe.named_parameters()))
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        pipe.checkpoint(optimizer).load(f"{folder}/run")
    assert [group["lr"] for group in optimizer.param_groups] == list(RATES.values())
    return "both learning rates, by parameter, in another layout"


if __name__ == "__main__":
    show(theirs, ours)
