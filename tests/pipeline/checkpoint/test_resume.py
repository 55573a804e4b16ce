"""A training that is saved and loaded in another layout goes on with the bits of a training that never stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.errors import CheckpointError
from tests.distributed import run_ranks
from tests.exhaustive import further

STEPS = 3  # before the save, and after it


class Tied(nn.Module):
    """An embedding that is also the head, dropout, running statistics, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(8))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[1].requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(12, (8,), generator=generator), torch.randint(12, (8,), generator=generator)


class Layout(NamedTuple):
    """How many ranks and stages, and under which schedule."""

    ranks: int
    stages: int
    schedule: str


ONE, TWO, FOUR = Layout(1, 2, "GPipe"), Layout(2, 4, "Interleaved1F1B"), Layout(4, 4, "1F1B")
ON_A_V, SPLIT = Layout(2, 4, "ZBVZeroBubble"), Layout(2, 2, "ZB1P")


def pipeline(layout: Layout, seed: int, mesh: Any = None) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    x, y = batch(0)
    return graphpp.compile(
        Tied(),
        F.cross_entropy,
        example=graphpp.Microbatch((x[:2],), target=y[:2]),
        split=layout.stages,
        schedule=layout.schedule,
        microbatches=4,
        mesh=mesh,
    )


Optimizers = Callable[[Iterable[nn.Parameter]], list[torch.optim.Optimizer]]


def adamw(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    own = list(parameters)
    decayed = [each for each in own if each.dim() > 1]
    groups = [{"params": decayed, "weight_decay": 0.3}, {"params": [p for p in own if p.dim() < 2], "lr": 2e-2}]
    return [torch.optim.AdamW([*groups, {"params": []}], lr=1e-2)]


def fused(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(list(parameters), lr=1e-2, fused=True, amsgrad=True)]


def sgd(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(list(parameters), lr=1e-2)]


def momentum(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(list(parameters), lr=1e-2, momentum=0.9, nesterov=True)]


def adafactor(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(list(parameters), lr=1e-2)]


def muon_and_adam(parameters: Iterable[nn.Parameter]) -> list[torch.optim.Optimizer]:
    own = list(parameters)
    matrices, rest = [p for p in own if p.dim() == 2], [p for p in own if p.dim() != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.Adam(rest, lr=1e-2)]


class Outcome(NamedTuple):
    """The losses of a training, its parameters and buffers on this rank, and the learning rates."""

    losses: list[float]
    state: dict[str, Tensor]
    rates: list[float]
    calls: int


def train(
    rank: int, layout: Layout, make: Optimizers, load: Path | None, save: Path | None, steps: int, seed: int
) -> Outcome:
    pipe = pipeline(layout, seed)
    optimizers = make(pipe.parameters())
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]
    checkpoint = pipe.checkpoint(*optimizers, *schedulers, extra={"batch": 0})
    if load is not None:
        checkpoint.load(load)
    first = checkpoint.extra["batch"]
    losses = []
    for number in range(first, first + steps):
        x, y = batch(number)
        losses.append(pipe.step(x, target=y).loss.item())
        pipe.clip_grad_norm_(0.5)
        for each in (*optimizers, *schedulers):
            each.step()
        pipe.zero_grad()
    checkpoint.extra["batch"] = first + steps
    if save is not None:
        checkpoint.save(save)
    rates = [group["lr"] for each in optimizers for group in each.param_groups if group["params"]]
    state = {key: value.clone() for key, value in pipe.state_dict().items()}
    return Outcome(losses, state, rates, pipe.steps)


def outcomes(layout: Layout, *arguments: Any) -> list[Outcome]:
    return [train(0, layout, *arguments)] if layout.ranks == 1 else run_ranks(train, layout.ranks, layout, *arguments)


def check_resumes(first: Layout, second: Layout, make: Optimizers, folder: Path) -> None:
    undisturbed = outcomes(ONE, make, None, None, 2 * STEPS, 3)[0]
    begun = outcomes(first, make, None, folder / "saved", STEPS, 3)
    resumed = outcomes(second, make, folder / "saved", None, STEPS, 17)
    for before, after in zip([begun[0]] * second.ranks, resumed, strict=True):
        assert before.losses + after.losses == undisturbed.losses
        assert after.rates == undisturbed.rates
        assert after.calls == 2 * STEPS
        for key, value in after.state.items():
            assert torch.equal(value, undisturbed.state[key]), key
    assert set().union(*(after.state for after in resumed)) == set(undisturbed.state)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FOUR, TWO),
        (TWO, ONE),
        (ONE, FOUR),
        *further((FOUR, ONE), (TWO, ON_A_V), (ON_A_V, SPLIT), (SPLIT, FOUR), (ONE, ON_A_V), (FOUR, FOUR), (SPLIT, TWO)),
    ],
)
def test_any_layout_resumes_any_other(first: Layout, second: Layout, tmp_path: Path) -> None:
    check_resumes(first, second, adamw, tmp_path)


@pytest.mark.parametrize("make", [fused, sgd, momentum, adafactor, muon_and_adam])
def test_optimizers_resume(make: Optimizers, tmp_path: Path) -> None:
    check_resumes(TWO, ONE, make, tmp_path)


def saves_in_the_background(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    pipe = pipeline(TWO, 3)
    optimizer = adamw(pipe.parameters())[0]
    checkpoint = pipe.checkpoint(optimizer)
    pending = checkpoint.async_save(folder)
    losses = []
    for number in range(2):  # goes on while the first state is written
        x, y = batch(number)
        losses.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
    pending.wait()
    assert pending.done()
    checkpoint.load(folder)
    optimizer.zero_grad()
    again = []
    for number in range(2):
        x, y = batch(number)
        again.append(pipe.step(x, target=y).loss.item())
        optimizer.step()
    return losses, again


def test_an_async_save_has_the_state_of_its_call(tmp_path: Path) -> None:
    for losses, again in run_ranks(saves_in_the_background, 2, tmp_path / "saved"):
        assert losses == again


def replicas_save(rank: int, folder: Path) -> tuple[list[float], list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    pipe = pipeline(SPLIT, 3, mesh)
    optimizer = momentum(pipe.parameters())[0]
    checkpoint = pipe.checkpoint(optimizer)

    def steps() -> list[float]:
        losses = []
        for number in range(2):
            x, y = batch(10 * mesh.get_local_rank("dp_replicate") + number)
            losses.append(pipe.step(x, target=y).loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses

    steps()
    checkpoint.save(folder)
    assert (folder / ".metadata").is_file()  # on the replica that does not write as well
    dist.barrier()
    state = torch.get_rng_state()
    first = steps()
    checkpoint.load(folder)
    torch.set_rng_state(state)
    return first, steps()


def test_replicas_load_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    for first, again in run_ranks(replicas_save, 4, tmp_path / "saved"):
        assert first == again


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_own_calls_take_the_checkpoint(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    pipe = pipeline(ONE, 3)
    optimizer = adamw(pipe.parameters())[0]
    x, y = batch(0)
    pipe.step(x, target=y)
    optimizer.step()
    dcp.save({"training": pipe.checkpoint(optimizer)}, checkpoint_id=tmp_path / "saved", no_dist=True)
    saved = {key: value.clone() for key, value in pipe.state_dict().items()}
    other = pipeline(ONE, 4)
    other.checkpoint(adamw(other.parameters())[0]).load(tmp_path / "saved")
    for key, value in other.state_dict().items():
        assert torch.equal(value, saved[key])


def test_an_object_without_a_state_is_refused() -> None:
    pipe = pipeline(ONE, 3)
    with pytest.raises(CheckpointError, match=r"argument 0 of pipe\.checkpoint is 3: give optimizers"):
        pipe.checkpoint(3)  # type: ignore[arg-type]


def test_a_pipeline_without_a_graph_cannot_say_which_parameters_are_its_own() -> None:
    pipe = graphpp.compile(Tied(), F.cross_entropy, split=2)
    with pytest.raises(graphpp.GraphPPError, match="nothing is captured yet"):
        pipe.checkpoint()
