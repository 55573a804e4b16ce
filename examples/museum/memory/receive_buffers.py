"""A receive buffer for every microbatch, made before the first one arrives.

https://github.com/pytorch/pytorch/issues/136811

A stage allocates buffers for all microbatches of a step up front, although 1F1B has a few in flight.
"""

import torch
from museum import batch, mlp, ranks, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2, 32), batch(64, 32)


def torch_rank(rank, microbatches):
    schedule, _ = torch_pipeline(list(model), mse_loss, microbatches, "1F1B")
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank else {}))
    stage = schedule._stage
    infos = [info for infos in getattr(stage, "args_recv_info", {}).values() for info in infos]
    kept = [info.buffer for info in infos if isinstance(getattr(info, "buffer", None), torch.Tensor)]
    return len(kept)


def our_rank(rank):
    found = []
    for microbatches in (4, 32):
        example = graphpp.Microbatch((x[:2],), target=y[:2])
        options = {"split": ["1"], "schedule": "1F1B", "memory": graphpp.Memory(release=False)}
        pipe = graphpp.compile(model, mse_loss, example=example, microbatches=microbatches, **options)
        pipe.step(x[: 2 * microbatches], target=y[: 2 * microbatches])
        found.append(pipe.plan.memory.ranks[1].messages)
    return found


def theirs():
    few, many = (ranks(torch_rank, 2, count)[1] for count in (4, 32))
    said = f"{few} buffers for 4 microbatches, {many} for 32"
    return f"right: {said}" if few == many else said


def ours():
    few, many = ranks(our_rank, 2)[1]
    assert few == many > 0
    return f"{few} bytes of messages on the second rank with 4 microbatches, and with 32"


show(theirs, ours)
