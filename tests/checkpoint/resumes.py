"""Save a training in one layout of ranks, stages and schedule, go on in another, and compare with one that never stopped.

    python -m tests.checkpoint.resumes

prints, for each pair of layouts, whether losses, learning rates, parameters and buffers after the second half are bit-equal to
those of one process that trained without a stop.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import graphpp
from tests.distributed import run_ranks
from tests.saved_graphs import GRAPHS

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
        artifact=GRAPHS,
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


def check_equal(begun: list[Outcome], resumed: list[Outcome], undisturbed: Outcome) -> None:
    """Raise `AssertionError` unless the two halves are bit-equal to the whole."""
    for after in resumed:
        assert begun[0].losses + after.losses == undisturbed.losses
        assert after.rates == undisturbed.rates
        assert after.calls == 2 * STEPS
        for key, value in after.state.items():
            assert torch.equal(value, undisturbed.state[key]), key
    assert set().union(*(after.state for after in resumed)) == set(undisturbed.state)


def check_resumes(first: Layout, second: Layout, make: Optimizers, folder: Path) -> None:
    undisturbed = outcomes(ONE, make, None, None, 2 * STEPS, 3)[0]
    begun = outcomes(first, make, None, folder / "saved", STEPS, 3)
    check_equal(begun, outcomes(second, make, folder / "saved", None, STEPS, 17), undisturbed)


def main() -> None:
    """Print the table of all pairs."""
    layouts = {"1, GPipe": ONE, "2, Interleaved1F1B": TWO, "2, ZBVZeroBubble": ON_A_V, "2, ZB1P": SPLIT, "4, 1F1B": FOUR}
    layouts["4, LoopedBFS"] = Layout(4, 8, "LoopedBFS")
    undisturbed = outcomes(ONE, adamw, None, None, 2 * STEPS, 3)[0]
    shown = Table("saved on (ranks, schedule)", *(f"resumed on {name}" for name in layouts))
    for name, first in layouts.items():
        with tempfile.TemporaryDirectory() as folder:
            begun = outcomes(first, adamw, None, Path(folder) / "saved", STEPS, 3)
            cells = []
            for second in layouts.values():
                try:
                    check_equal(begun, outcomes(second, adamw, Path(folder) / "saved", None, STEPS, 17), undisturbed)
                    cells.append("equal")
                except AssertionError:
                    cells.append("DIFFERS")
        shown.add_row(name, *cells)
    Console(width=160).print(shown)


if __name__ == "__main__":
    main()
