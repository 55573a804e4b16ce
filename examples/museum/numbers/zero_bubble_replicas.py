"""Zero bubble over data-parallel replicas.

https://github.com/pytorch/pytorch/issues/144530

A zero-bubble schedule takes gradients without `backward()`, so the hooks of DDP never run, and each replica trains on its
own. Two replicas here; each runs two stages under ZBVZeroBubble.
"""

import torch
import torch.distributed as dist
from museum import batch, compare, eager, equal, gradients, mlp, named, ranks, show
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleZBVZeroBubble
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import graphpp

model, (x, y) = mlp(2), batch(16)
apart = [eager(model, mse_loss, x[rows], y[rows], 4) for rows in (slice(0, 8), slice(8, 16))]
expected = {name: (apart[0][name] + apart[1][name]) / 2 for name in apart[0]}


def torch_rank(rank):
    groups = [dist.new_group([each]) for each in range(2)]
    parts = [DistributedDataParallel(part) for part in model]
    cpu = torch.device("cpu")
    stages = [PipelineStage(part, index, 2, cpu, group=groups[rank]) for index, part in enumerate(parts)]
    schedule = ScheduleZBVZeroBubble(stages, 4, loss_fn=mse_loss)
    schedule.step(x[8 * rank : 8 * rank + 8], target=y[8 * rank : 8 * rank + 8])
    return named(model)


def our_rank(rank):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="ZBVZeroBubble", microbatches=4, mesh=mesh)
    pipe.step(x[8 * rank : 8 * rank + 8], target=y[8 * rank : 8 * rank + 8])
    return gradients(model)


def theirs():
    return compare(ranks(torch_rank, 2)[0], expected)


def ours():
    first, second = ranks(our_rank, 2)
    assert equal(second, first)
    return f"{equal(first, expected)}, on both replicas"


show(theirs, ours)
