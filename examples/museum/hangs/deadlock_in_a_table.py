"""An order of actions in which each rank waits for the other.

https://github.com/pytorch/pytorch/issues/172668

After messages were moved to save bubbles, the step stops for ever: each rank waits for a message that the other one sends
later. Here such an order stands in a file.
"""

import tempfile
from pathlib import Path

import torch
from museum import batch, mlp, outcomes, refused, show
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

import graphpp

ROWS = [  # rank 0 wants a gradient before it sends microbatch 1, rank 1 wants microbatch 1 before it sends that gradient
    "0F0 0SEND_F0 0RECV_B0 0B0 0F1 0SEND_F1 0RECV_B1 0B1",
    "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
]
model, (x, y) = mlp(2), batch()


def torch_rank(rank):
    schedule = _PipelineScheduleRuntime([PipelineStage(model[rank], rank, 2, torch.device("cpu"))], 2, loss_fn=mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "order.csv"
        file.write_text("\n".join(row.replace(" ", ",") for row in ROWS))
        schedule._load_csv(str(file), format="compute_comms")
    schedule.step(*((x,) if rank == 0 else ()), **({"target": y} if rank == 1 else {}))
    return "ended"


def theirs():
    found = outcomes(torch_rank, 2, seconds=10)
    return "right: it ended" if found == ["ended"] * 2 else f"the file is accepted, and the step {found[0].text}"


def try_in_one_process():
    part = graphpp.Microbatch((x[:4],), target=y[:4])
    graphpp.verify(model, mse_loss, part, split=["1"], schedule=ROWS, microbatches=2, ranks=2)


def ours():
    return refused(try_in_one_process, "deadlock", "rank 0", "rank 1")


show(theirs, ours)
