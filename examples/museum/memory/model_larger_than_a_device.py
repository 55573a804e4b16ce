"""A model that fits on no device.

https://github.com/pytorch/PiPPy/issues/988

Each process of the example builds the whole model, and runs out of memory. The answer: build it on the CPU, or on the meta
device, from where a stage could not yet get its weights.
"""

import tempfile

import torch
from museum import batch, equal, mlp, ranks, show
from safetensors.torch import save_file
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.nn.functional import mse_loss

import graphpp

whole, (x, y) = mlp(layers=4), batch()


def our_rank(rank, folder):
    with torch.device("meta"):
        model = mlp(layers=4)
    pipe = graphpp.compile(model, mse_loss, example=graphpp.Microbatch((x[:2],), target=y[:2]), split=["2"], microbatches=4)
    pipe.materialize(weights=folder)
    pipe.step(x, target=y)
    return pipe.state_dict(), sum(not parameter.is_meta for parameter in model.parameters())


def theirs():
    with torch.device("meta"):
        model = mlp(layers=4)
        cut = pipeline(model, (torch.empty(2, 8),), split_spec={"2": SplitPoint.BEGINNING})
    stage = cut.get_stage_module(1)
    try:
        stage.load_state_dict(whole.state_dict(), assign=True)
    except RuntimeError as error:
        return f"no call for it; loading the model's state dict into a stage raises {str(error).splitlines()[0]}"
    return "right: a stage takes its part of the model's state dict"


def ours():
    with tempfile.TemporaryDirectory() as folder:
        save_file({name: value.contiguous() for name, value in whole.state_dict().items()}, f"{folder}/model.safetensors")
        (first, count), (second, other) = ranks(our_rank, 2, folder)
    assert count == other == 4  # of 8 parameters; the others have no memory
    said = equal(first | second, whole.state_dict()).replace("eager", "the file")
    return f"{said}; each rank has memory for its stage alone"


show(theirs, ours)
