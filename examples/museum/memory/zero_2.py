"""ZeRO-2 under a pipeline.

https://github.com/deepspeedai/DeepSpeed/issues/823

A pipeline adds up gradients over the microbatches, so DeepSpeed keeps all of them whole until the step ends. Sharded
gradients, as in ZeRO-2, raise an error.
"""

import torch
from museum import batch, eager, equal, mlp, not_run, ranks, show
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(layers=4, width=32), batch(16, 32)
apart = [eager(model, mse_loss, x[rows], y[rows], 4) for rows in (slice(0, 8), slice(8, 16))]
expected = {name: (apart[0][name] + apart[1][name]) / 2 for name in apart[0]}


def our_rank(rank):
    found = []
    for keep in (None, 1):
        torch.manual_seed(0)
        copy = mlp(layers=4, width=32)
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_shard"))
        options = {"split": ["1", "2", "3"], "schedule": "Interleaved1F1B", "microbatches": 4, "mesh": mesh}
        pipe = graphpp.compile(copy, mse_loss, parallel=graphpp.Parallel(keep=keep), **options)
        pipe.step(x[8 * rank : 8 * rank + 8], target=y[8 * rank : 8 * rank + 8])
        gradients = {name: parameter.grad.full_tensor() for name, parameter in pipe.named_parameters()}
        found.append((pipe.plan.memory.ranks[0].gradients, gradients))
    return found


def theirs():
    return not_run("deepspeed")


def ours():
    (all_stages, _), (one_stage, gradients) = ranks(our_rank, 2)[0]
    assert one_stage == all_stages / 4
    said = equal(gradients, expected, close=1e-6)
    return f"{said}; `keep=1` holds whole gradients of {one_stage:,} bytes in place of {all_stages:,}; all stages on each rank"


show(theirs, ours)
