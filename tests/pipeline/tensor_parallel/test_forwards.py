"""Forwards that look at their own parameters, write buffers or use whole parameters for sharded values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import all_reduce
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import graphpp
from graphpp.errors import GraphPPError
from tests.distributed import run_ranks


class Network(nn.Module):
    """Two sharded layers; subclasses say what happens between them, and what is added to the output."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        parallelize_module(self, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.between(self.up(x)))) + self.added()

    def between(self, hidden: Tensor) -> Tensor:
        return hidden

    def added(self) -> Tensor | float:
        return 0.0


class Penalised(Network):
    """Reads parameters as `parameters()`, `named_parameters()`, `get_parameter` and from lists give them."""

    def added(self) -> Tensor | float:
        named, whole = dict(self.named_parameters()), [each for each in self.parameters() if each.dim() == 2]
        total = sum((each.pow(2).sum().full_tensor() for each in whole), torch.zeros(()))
        shape = named["up.weight"].shape[0] + self.get_parameter("down.weight").shape[1]
        return total / shape + self.up.weight.abs().sum().full_tensor()


class Averaging(Network):
    """Keeps a running mean of hidden values in a sharded buffer, by assignment or in place."""

    def __init__(self, mesh: DeviceMesh, *, in_place: bool) -> None:
        super().__init__(mesh)
        self.in_place, self.mesh = in_place, mesh
        self.register_buffer("mean", DTensor.from_local(torch.zeros(4), mesh, [Shard(0)]))

    def between(self, hidden: Tensor) -> Tensor:
        now = DTensor.from_local(hidden.detach().mean(0), self.mesh, [Shard(0)])
        if self.in_place:
            self.mean.mul_(0.5).add_(now)
        else:
            self.mean = self.mean * 0.5 + now
        return hidden + self.mean.to_local()


class Sum(torch.autograd.Function):
    """The sum over the ranks, by collectives that write into their argument; the gradient is summed likewise."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group)
        return total, None


class Reducing(Network):
    """Scales hidden values by a number of all ranks; a whole parameter takes part, whose gradient the Function makes whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.group = mesh.get_group()
        self.scale = nn.Parameter(torch.ones(()))

    def between(self, hidden: Tensor) -> Tensor:
        scale = Sum.apply(self.scale * 1.0, self.group)
        return hidden * scale + Sum.apply(hidden.mean(), self.group)


MODELS: dict[str, Any] = {
    "collectives in place": Reducing,
    "penalised": Penalised,
    "assigned buffer": lambda mesh: Averaging(mesh, in_place=False),
    "buffer in place": lambda mesh: Averaging(mesh, in_place=True),
}


def beside_eager(rank: int, name: str) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    model, eager = MODELS[name](mesh["tp"]), MODELS[name](mesh["tp"])
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    pipe = graphpp.compile(model, lambda out: (out * out).mean(), mesh=mesh, microbatches=2)
    for _ in range(2):
        found = pipe.step(x)
        expected = [(eager(part) ** 2).mean() for part in x.chunk(2)]
        sum(each / 2 for each in expected).backward()
        torch.testing.assert_close(found.losses, torch.stack(expected).detach(), rtol=1e-6, atol=0)
    own = dict(eager.named_parameters())
    for fqn, parameter in pipe.named_parameters():
        gradients = own[fqn].grad, parameter.grad
        placed = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
        torch.testing.assert_close(*placed, rtol=1e-5, atol=1e-6)
    for fqn, buffer in eager.named_buffers():
        torch.testing.assert_close(dict(model.named_buffers())[fqn].to_local(), buffer.to_local())


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("name", MODELS)
def test_forwards_see_the_tensors_of_eager(name: str) -> None:
    run_ranks(beside_eager, 2, name)


class Scaled(Network):
    """Multiplies sharded hidden values by a parameter that every rank has whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.scale = nn.Parameter(torch.ones(4))

    def between(self, hidden: Tensor) -> Tensor:
        return hidden * self.scale


class Statistics(Network):
    """Keeps statistics of sharded hidden values in buffers that every rank has whole."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.norm = nn.BatchNorm1d(4, affine=False)

    def between(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)


class Ranked(Network):
    """Adds another number on each rank."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.rank = mesh.get_local_rank()

    def added(self) -> Tensor | float:
        return float(self.rank)


class Foreign(Network):
    """Reads a sharded parameter of another model."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.others = [Network(mesh).up.weight]

    def added(self) -> Tensor | float:
        return self.others[0].pow(2).sum().full_tensor()


class Broadcasting(Network):
    """Takes the first rank's values."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__(mesh)
        self.group = mesh.get_group()

    def between(self, hidden: Tensor) -> Tensor:
        dist.broadcast(hidden, 0, group=self.group)
        return hidden


REFUSED: dict[str, tuple[Any, str]] = {
    "a whole parameter": (Scaled, "whole parameter scale, and uses the parameter for values .* tp, at .*test_forwards"),
    "a whole buffer": (Statistics, "whole buffer norm.running_mean, and the forward writes values that are spread over tp"),
    "a loss of each rank": (Ranked, "so ranks would have other losses"),
    "a collective in place": (Broadcasting, r"calls torch.distributed.broadcast at .*test_forwards.* functional collective"),
    "a tensor of another model": (Foreign, r"reads a tensor of shape \[8, 4\] that requires grad and is no parameter"),
}


def refused(rank: int, what: str) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    kind, message = REFUSED[what]
    pipe = graphpp.compile(kind(mesh["tp"]), lambda out: (out * out).mean(), mesh=mesh, microbatches=2)
    with pytest.raises(GraphPPError, match=message):
        pipe.step(torch.ones(4, 4))


@pytest.mark.first_cases(3)
@pytest.mark.parametrize("what", REFUSED)
def test_values_that_would_differ_between_ranks_are_refused(what: str) -> None:
    run_ranks(refused, 2, what)


def other_calls(rank: int) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    with torch.device("meta"):
        model = Network(mesh["tp"])
    x = torch.ones(4, 4)
    pipe = graphpp.compile(model, lambda out: out.mean(), example=graphpp.Microbatch((x[:2],)), mesh=mesh, microbatches=2)
    with pytest.raises(GraphPPError, match=r"args\[0\] is a DTensor, .* args\[0\].full_tensor\(\)"):
        pipe.step(DTensor.from_local(x, mesh["tp"], [Replicate()]))
    with pytest.raises(GraphPPError, match=r"up.weight is a DTensor .*, and graphpp.verify runs in one process"):
        graphpp.verify(model, lambda out: out.mean(), graphpp.Microbatch((x,)))


def test_calls_that_need_whole_parameters_say_so() -> None:
    run_ranks(other_calls, 2)
