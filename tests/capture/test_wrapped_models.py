"""Models under torch's own parallelism are refused by name, with what to give instead; compiled ones are taken as they were."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.errors import CaptureError
from tests.distributed import run_ranks


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))


def fully_sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    return fully_shard(fully_shard(model[1], mesh=mesh) and model, mesh=mesh)


def flat_sharded(model: nn.Sequential) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def one_replicated(model: nn.Sequential) -> nn.Module:
    model[1] = nn.parallel.DistributedDataParallel(model[1])
    return model


def composed(model: nn.Sequential) -> nn.Module:
    from torch.distributed._composable.replicate import replicate

    return replicate(model)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, init_device_mesh("cpu", (2,)), {"0.0": ColwiseParallel()})


REFUSED: dict[Callable[[nn.Sequential], nn.Module], str] = {
    fully_sharded: "the model is under torch's fully_shard, .* as it is before fully_shard",
    flat_sharded: "the model is under torch's FullyShardedDataParallel",
    nn.parallel.DistributedDataParallel: "the model is under torch's DistributedDataParallel",
    one_replicated: "the module 1 is under torch's DistributedDataParallel",
    composed: "the model is under torch's replicate",
    tensor_parallel: r"0\.0\.weight is a DTensor over DeviceMesh\(.*\), and mesh= of graphpp.compile has no dimension tp or ep",
}


def refused(rank: int, wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    with pytest.raises(CaptureError, match=REFUSED[wrap]):
        graphpp.compile(wrap(layers()), F.mse_loss, schedule="1F1B", microbatches=2)


@pytest.mark.parametrize("wrap", REFUSED)
def test_a_model_under_torchs_parallelism_is_refused_by_name(wrap: Callable[[nn.Sequential], nn.Module]) -> None:
    run_ranks(refused, 2, wrap)


def one_compiled(model: nn.Sequential) -> nn.Module:
    model[1].compile()
    return model


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of Dynamo's own imports
@pytest.mark.parametrize("wrap", [torch.compile, one_compiled])
def test_a_compiled_model_trains_as_the_model_in_it(wrap: Callable[[nn.Module], nn.Module]) -> None:
    x, losses = torch.ones(4, 8), []
    for model in (layers(), wrap(layers())):
        pipe = graphpp.compile(model, F.mse_loss, split=2, microbatches=2)
        losses.append(pipe.step(x, target=x).loss)
    assert torch.equal(*losses)
