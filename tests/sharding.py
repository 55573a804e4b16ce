"""Trainings on a mesh with `dp_shard`, and the same in one process: a loop over the replicas that averages their gradients.

Contract: `train_on_mesh` runs on one rank; whole gradients and parameters are gathered there. `train_alone` runs each replica's
batches in turn, adds the gradients in the order of the replicas and divides by their number.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import DEVICE, on_cpu, run_ranks
from tests.saved_graphs import GRAPHS

DATA = ("dp_replicate", "dp_shard", "ep", "cp")
ROWS, VOCAB, WIDTH = 16, 13, 7
STEPS = 3


class Odd(nn.Module):
    """Frozen, 0-dim and unused parameters, rows that no number of ranks divides, statistics, channels last; tied or not."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4))
        self.layers[1][0].weight.requires_grad_(False)
        self.conv = nn.Conv2d(1, 3, 2, padding=1).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(3))
        self.norm: nn.Module = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        x = x + self.conv(x[:, None, None]).mean((1, 2, 3))[:, None] * self.one
        return self.head(self.norm(x))


class RunningMean(nn.Module):
    """A layer norm that keeps a running mean in float32, whatever it computes in."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(x.detach().float().mean(0), alpha=0.1)
        return self.norm(x - self.mean.to(x.dtype))


def odd(*, tied: bool = False, statistics: type[nn.Module] | None = None) -> Odd:
    """`statistics`: the layer in the place of the batch norm, which computes in one dtype only."""
    torch.manual_seed(3)
    model = Odd(tied=tied)
    if statistics is not None:
        model.norm = statistics()
    return model


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(VOCAB, (ROWS,), generator=generator), torch.randint(VOCAB, (ROWS,), generator=generator)


class Mesh(NamedTuple):
    """Sizes by dimension, in order."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    @property
    def ranks(self) -> int:
        return prod(self.sizes)

    @property
    def replicas(self) -> int:
        return prod(size for size, name in zip(self.sizes, self.names, strict=True) if name in DATA)

    def size(self, name: str) -> int:
        """The ranks along a dimension; 1 along one that the mesh lacks."""
        return dict(zip(self.names, self.sizes, strict=True)).get(name, 1)

    def replica(self, rank: int) -> int:
        """The place of a rank among the ranks that train the same stages; data dimensions are in the order of `DATA`."""
        found, at = 0, dict[str, int]()
        for size, name in zip(reversed(self.sizes), reversed(self.names), strict=True):
            at[name], rank = rank % size, rank // size
        for name in DATA:
            if name in at:
                found = found * self.sizes[self.names.index(name)] + at[name]
        return found

    def made(self) -> DeviceMesh:
        return init_device_mesh(DEVICE.type, self.sizes, mesh_dim_names=self.names)


class Trained(NamedTuple):
    """By step: losses of this rank's replica, norms, whole gradients by FQN; at the end the whole parameters."""

    losses: list[Tensor]
    norms: list[Tensor]
    grads: list[dict[str, Tensor | None]]
    params: dict[str, Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.01, momentum=0.9, weight_decay=0.01)


Optimizers = Callable[[Any], torch.optim.Optimizer]


def example(microbatches: int = 4) -> graphpp.Microbatch:
    tokens, target = batch(0)
    rows = ROWS // microbatches
    return graphpp.Microbatch((tokens[:rows],), {}, target[:rows])


def compiled(mesh: DeviceMesh | None, model: nn.Module, **options: Any) -> graphpp.Pipeline:
    return graphpp.compile(model, F.cross_entropy, mesh=mesh, **{"microbatches": 4, "artifact": GRAPHS, **options})


def train_on_mesh(
    rank: int,
    mesh: Mesh,
    options: Mapping[str, Any],
    tied: bool = False,
    max_norm: float | None = None,
    statistics: type[nn.Module] | None = None,
) -> Trained:
    """Train with each replica on batches of its own."""
    torch.set_num_threads(1)
    made = mesh.made()
    pipe = compiled(made, odd(tied=tied, statistics=statistics), **options)
    found, optimizer = Trained([], [], [], {}), None
    for number in range(STEPS):
        tokens, target = batch(100 * number + mesh.replica(rank))
        found.losses.append(pipe.step(tokens, target=target).losses)
        optimizer = optimizer or sgd(pipe.parameters())
        if max_norm is not None:
            found.norms.append(pipe.clip_grad_norm_(max_norm))
        grads = {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()}
        found.grads.append({fqn: None if grad is None else whole_tensor(grad).clone() for fqn, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
    found.params.update({fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()})
    return on_cpu(found)


@cache
def train_alone(replicas: int, tied: bool = False, max_norm: float | None = None) -> list[Trained]:
    """The same training in one process; for each replica its losses, and what all have in common."""
    pipe = compiled(None, odd(tied=tied), example=example())
    optimizer = sgd(pipe.parameters())
    found = [Trained([], [], [], {}) for _ in range(replicas)]
    for number in range(STEPS):
        sums: dict[str, Tensor | None] = {}
        for replica in range(replicas):
            tokens, target = batch(100 * number + replica)
            found[replica].losses.append(pipe.step(tokens, target=target).losses)
            for fqn, parameter in pipe.named_parameters():
                total = sums.get(fqn)
                sums[fqn] = parameter.grad if total is None or parameter.grad is None else total + parameter.grad
            pipe.zero_grad()
        for fqn, parameter in pipe.named_parameters():
            total = sums[fqn]
            parameter.grad = None if total is None else total / replicas
        norm = None if max_norm is None else pipe.clip_grad_norm_(max_norm)
        grads = {fqn: None if p.grad is None else p.grad.clone() for fqn, p in pipe.named_parameters()}
        for each in found:
            each.grads.append(grads)
            each.norms.extend([] if norm is None else [norm])
        optimizer.step()
        optimizer.zero_grad()
    for each in found:
        each.params.update({fqn: parameter.detach().clone() for fqn, parameter in pipe.named_parameters()})
    return on_cpu(found)


def resumed(
    pipe: graphpp.Pipeline, checkpoint: Any, folder: Any, step: Callable[[int], None], *, saves: bool
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The whole parameters of a checkpoint, as saved or as loaded, and those one step after it was loaded.

    `saves`: whether the pipeline makes the checkpoint, after two steps, and trains on before it loads it.
    """

    def values() -> dict[str, Tensor]:
        return {fqn: whole_tensor(each).clone() for fqn, each in pipe.named_parameters()}

    if saves:
        step(0)
        step(1)
        checkpoint.save(folder)
        saved = values()
        step(2)
    checkpoint.load(folder)
    found = saved if saves else values()
    step(0)
    return found, values()


def check_state_dicts(pipe: graphpp.Pipeline, whole: Mapping[str, Tensor], folder: Path) -> None:
    """Each door to a rank's values has those of the whole model. Called by all ranks."""
    assert all(torch.equal(whole_tensor(value), whole[key]) for key, value in pipe.state_dict().items())
    gathered = pipe.gather(rank=None)
    assert gathered.keys() == whole.keys()
    assert all(torch.equal(gathered[key], value) for key, value in whole.items())
    pipe.save_weights(folder / "weights")
    files = sorted((folder / "weights").glob("*.safetensors"))
    found = {key: value for file in files for key, value in load_file(file).items()}
    assert found and all(torch.equal(value, whole[key]) for key, value in found.items())
    other = {key: value + 1 for key, value in whole.items()}
    pipe.load_state_dict(other)
    assert all(torch.equal(whole_tensor(value), other[key]) for key, value in pipe.state_dict().items())
    pipe.load_state_dict(pipe.state_dict())  # this rank's own DTensors
    assert all(torch.equal(whole_tensor(value), other[key]) for key, value in pipe.state_dict().items())


Resumes = Callable[[int, Mesh, Path, bool], tuple[dict[str, Tensor], dict[str, Tensor]]]


def check_resume(trained: Resumes, saves: Mesh, loads: Mesh, folder: Path, **tolerances: float) -> None:
    """A checkpoint that one mesh saves is loaded by another, whose next step is the same. `trained`: as `resumed` returns."""

    def ran(mesh: Mesh, saving: bool) -> list[dict[str, Tensor]]:
        parts = run_ranks(trained, mesh.ranks, mesh, folder, saving) if mesh.names else [trained(0, mesh, folder, saving)]
        return [dict(ChainMap(*each)) for each in zip(*parts, strict=True)]

    (saved, expected), (loaded, gone_on) = ran(saves, True), ran(loads, False)
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[fqn], loaded[fqn]) for fqn in saved)
    for fqn, parameter in gone_on.items():
        torch.testing.assert_close(parameter, expected[fqn], **tolerances)
