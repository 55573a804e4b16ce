"""Every stage loads the data.

https://github.com/deepspeedai/DeepSpeed/issues/4255

The first and the last stage each read the whole batch from a loader. The thread asks to read it once, on the first stage.
"""

from museum import batch, eager, equal, mlp, not_run, own, ranks, show
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(3), batch()
expected = eager(model, mse_loss, x, y, 4)


def our_rank(rank):
    example = graphpp.Microbatch((x[:2],), target=y[:2])
    pipe = graphpp.compile(model, mse_loss, example=example, split=["1", "2"], schedule="1F1B", microbatches=4)
    nothing = graphpp.absent((8, 8))
    inputs, target = (x, y) if rank == 0 else (nothing, nothing)  # rank 0 alone has a loader
    pipe.step(inputs, target=target)
    return own(pipe), pipe.inputs_needed()


def theirs():
    return not_run("deepspeed")


def ours():
    found = ranks(our_rank, 3)
    needed = [each for _, each in found]
    assert needed == [["args[0]"], [], ["target"]]
    gradients = {name: value for each, _ in found for name, value in each.items()}
    return f"{equal(gradients, expected)}; rank 0 loads all, and sends the last rank its targets"


show(theirs, ours)
