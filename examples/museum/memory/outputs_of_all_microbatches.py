"""The last stage keeps the outputs of a whole step.

https://github.com/pytorch/pytorch/issues/159251

The logits of every microbatch stay until the step ends, to be merged for a caller that does not want them. Their memory grows
with the number of microbatches.
"""

import weakref

from museum import batch, eager, equal, gradients, mlp, named, show, torch_pipeline
from torch.nn.functional import mse_loss

import graphpp

model, (x, y) = mlp(2), batch(32)
expected = eager(model, mse_loss, x, y, 16)


def theirs():
    outputs = []

    def loss(output, target):
        outputs.append(weakref.ref(output.untyped_storage()))
        most.append(sum(each() is not None for each in outputs))
        return mse_loss(output, target)

    said = []
    for options in ({}, {"return_outputs": False}):
        most: list[int] = []
        outputs.clear()
        schedule, _ = torch_pipeline(list(model), loss, 16, "Interleaved1F1B")
        schedule.step(x, target=y, losses=[], **options)
        equal(named(model), expected)
        model.zero_grad()
        said.append(f"{max(most)} of 16 outputs alive {'with' if options else 'without'} `return_outputs=False`")
    return ", ".join(said)


def ours():
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="1F1B", microbatches=16)
    pipe.step(x, target=y)
    few = pipe.plan.memory.ranks[0].activations
    pipe = graphpp.compile(model, mse_loss, split=["1"], schedule="1F1B", microbatches=4)
    pipe.step(x[:8], target=y[:8])
    assert pipe.plan.memory.ranks[0].activations == few
    model.zero_grad()
    graphpp.compile(model, mse_loss, split=["1"], schedule="1F1B", microbatches=16).step(x, target=y)
    return f"{equal(gradients(model), expected)}; {few} bytes of activations with 4 and with 16 microbatches"


show(theirs, ours)
