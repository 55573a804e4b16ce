"""Most parameters are frozen, a whole stage among them.

https://github.com/pytorch/PiPPy/issues/1122

The thread asks whether a pipeline works with PEFT, where stages may have no trained parameter, and the answer names the
assumption that gradients flow back as activations flow forward. Here the first stage is frozen.
"""

from museum import batch, compare, eager, equal, gradients, mlp, named, show, torch_step
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(), batch()
model[:2].requires_grad_(False)
expected = eager(model, mse_loss, x, y, 4)


def theirs():
    found = []
    for schedule in ("Interleaved1F1B", "ZBVZeroBubble"):
        try:
            torch_step([model[:2], model[2:]], mse_loss, x, y, 4, schedule)
            found.append(f"{schedule} {compare(named(model), expected)}")
        except RuntimeError as error:
            found.append(f"{schedule} raises {str(error).splitlines()[0]}")
        model.zero_grad()
    return "; ".join(found)


def ours():
    for schedule in ("GPipe", "1F1B", "ZBVZeroBubble"):
        pipe = graphpp.compile(model, mse_loss, split=["2"], schedule=schedule, microbatches=4)
        pipe.step(x, target=y)
        said = equal(gradients(model), expected)
        model.zero_grad()
    return f"{said}, under three schedules"


show(theirs, ours)
