"""ZeRO-3 under a pipeline.

https://github.com/deepspeedai/DeepSpeed/issues/1629

DeepSpeed refuses ZeRO-2 and ZeRO-3 with its pipeline. The thread asks why. Here two ranks share the parameters of all stages,
and neither ever holds a whole stage.
"""

from museum import batch, eager, equal, mlp, not_run, ranks, show
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(layers=4, width=32), batch(16, 32)
apart = [eager(model, mse_loss, x[rows], y[rows], 4) for rows in (slice(0, 8), slice(8, 16))]
expected = {name: (apart[0][name] + apart[1][name]) / 2 for name in apart[0]}
whole = sum(parameter.numel() for parameter in model.parameters())


def our_rank(rank):
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_shard"))
    example = graphpp.Microbatch((x[:2],), target=y[:2])
    options = {"split": ["2"], "microbatches": 4, "mesh": mesh, "parallel": graphpp.Parallel(keep=0)}
    pipe = graphpp.compile(model, mse_loss, example=example, **options)
    pipe.step(x[8 * rank : 8 * rank + 8], target=y[8 * rank : 8 * rank + 8])
    held = sum(parameter.to_local().numel() for parameter in pipe.parameters())
    alive = pipe.plan.memory.ranks[0].weights
    return held, alive, {name: parameter.grad.full_tensor() for name, parameter in pipe.named_parameters()}


def theirs():
    return not_run("deepspeed")


def ours():
    (held, alive, gradients), (other, _, _) = ranks(our_rank, 2)
    assert held == other == whole // 2
    assert alive <= 2 * 4 * whole // 4, alive  # bytes of at most two of the four layers
    said = equal(gradients, expected, close=1e-6)
    return f"{said}; each rank holds half of each parameter, and at most two of four layers whole; all stages on each rank"


show(theirs, ours)
