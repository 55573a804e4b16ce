"""Compare the errors of `backend="inductor"` against eager with the errors that Inductor has on the uncut model.

    python benchmarks/inductor_numbers.py [--models llama gpt2 moe vit] [--zoo gpt2 t5] [--stages 4] [--json numbers.json]

For each model, without dropout, one step over the same microbatches runs in one process three times: as a plain eager loop; as
the same loop with model and loss under torch.compile, uncut; as graphpp's pipeline with the backend, its stages local. The
second and third are compared with the first. Errors are relative: a loss's error to the loss, a gradient's by the 2-norm of
the difference to the 2-norm of the gradient (relative_errors.py).

The tolerance is --allowed times torch.compile's error on the same model, or the median of its errors on all models
if that is more. The exit status is 1 where graphpp's error exceeds the tolerance, or graphpp has other gradients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contenders import BACKENDS
from harness import start
from relative_errors import Errors, Numbers, against
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from workloads import NAMES, Size, workload

import graphpp

sys.path.append(str(Path(__file__).parents[1]))
from tests.models import Batch
from tests.reference import model_loss
from tests.zoo.models import ZOO

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Subject:
    """A model to be compared."""

    name: str
    model: Callable[[], nn.Module]  # returns the same parameters at each call
    loss: Loss | None
    batch: Batch
    split: int | Sequence[str]


def main() -> None:
    option = options()
    device = start()
    found = {subject.name: errors(subject, option, device) for subject in subjects(option)}
    Console(width=150).print(table(found, option.backend))
    if option.json:
        Path(option.json).write_text(json.dumps({name: spelled(pair) for name, pair in found.items()}, indent=1))
    sys.exit(verdict(found, option.allowed))


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(NAMES), choices=NAMES)
    parser.add_argument("--zoo", nargs="*", default=["gpt2", "t5", "mixtral", "unet"], choices=list(ZOO))
    parser.add_argument("--backend", default="inductor", choices=BACKENDS)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens in a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of a microbatch, but of the zoo's")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--allowed", type=float, default=3.0, help="how many times torch.compile's error")
    parser.add_argument("--json", help="file for all errors")
    return parser.parse_args()


def subjects(option: argparse.Namespace) -> list[Subject]:
    """The models that were asked for."""
    size = Size(option.dim, option.layers, option.length, dropout=0.0)
    split = [f"layers.{stage * option.layers // option.stages}" for stage in range(1, option.stages)]
    ours = []
    for work in (workload(name, size) for name in option.models):
        inputs, targets = work.batch(option.rows * option.microbatches)
        ours.append(Subject(work.name, work.model, work.loss, Batch((inputs,), {}, targets), split))
    known = [(name, ZOO[name]) for name in option.zoo]
    zoo = [Subject(f"zoo {name}", entry.model, entry.loss, entry.batch(0), option.stages) for name, entry in known]
    return ours + zoo


# ------------------------------------------------------------------------------------------------------ three ways to run


def errors(subject: Subject, option: argparse.Namespace, device: torch.device) -> tuple[Errors, Errors]:
    """The errors of graphpp and of torch.compile."""
    torch.compiler.reset()
    eager = plain(subject, option.microbatches, device, compiled=False)
    theirs = against(eager, plain(subject, option.microbatches, device, compiled=True))
    return against(eager, piped(subject, option, device)), theirs


def plain(subject: Subject, microbatches: int, device: torch.device, *, compiled: bool) -> Numbers:
    """One process that adds up gradients over the microbatches, without graphpp."""
    model = subject.model().to(device)

    def forward(batch: Batch) -> Tensor:
        return model_loss(model, subject.loss, batch)

    run = torch.compile(forward, dynamic=False) if compiled else forward
    losses = []
    for part in subject.batch.microbatches(microbatches):
        loss = run(on(part, device))
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return Numbers(torch.stack(losses), {name: parameter.grad for name, parameter in model.named_parameters()})


def piped(subject: Subject, option: argparse.Namespace, device: torch.device) -> Numbers:
    """graphpp, with all stages in this process."""
    batch = on(subject.batch, device)
    pipe = graphpp.compile(
        subject.model(),
        subject.loss,
        example=graphpp.Microbatch(*batch.microbatches(option.microbatches)[0]),
        split=subject.split,
        microbatches=option.microbatches,
        parallel=graphpp.Parallel(device=device),
        backend=option.backend,
    )
    result = pipe.step(*batch.args, target=batch.target, **batch.kwargs)
    return Numbers(result.losses, {name: parameter.grad for name, parameter in pipe.named_parameters()})


def on(batch: Batch, device: torch.device) -> Batch:
    """The batch with its tensors on a device."""

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    kwargs = {name: moved(value) for name, value in batch.kwargs.items()}
    return Batch(tuple(map(moved, batch.args)), kwargs, moved(batch.target))


# ------------------------------------------------------------------------------------------------------------- results


def verdict(found: dict[str, tuple[Errors, Errors]], allowed: float) -> int:
    """Print the largest errors, and where graphpp's are above the tolerance; the exit status."""
    failed = False
    for figure in ("loss", "gradient"):
        pairs = {name: tuple(getattr(errors, figure) for errors in pair) for name, pair in found.items()}
        usual = statistics.median(theirs for _, theirs in pairs.values())
        ours, theirs = (max(pair[way] for pair in pairs.values()) for way in range(2))
        print(f"{figure}: largest error of graphpp {ours:.2g}, of torch.compile {theirs:.2g}, median there {usual:.2g}")
        for name, pair in pairs.items():
            if not pair[0] <= allowed * max(pair[1], usual):
                failed = True
                print(f"  {name}: {pair[0]:.2g} is more than {allowed:g} x torch.compile's {max(pair[1], usual):.2g}")
    return int(failed)


def spelled(pair: tuple[Errors, Errors]) -> dict[str, Any]:
    named = zip(("graphpp", "torch"), pair, strict=True)
    return {name: {"loss": each.loss, "gradients": each.gradients} for name, each in named}


def table(found: dict[str, tuple[Errors, Errors]], backend: str) -> Table:
    """One line per model."""
    shown = Table(title=f"relative error against one eager process, backend {backend}", title_justify="left")
    for column in ("model", "loss: graphpp", "torch.compile", "gradient: graphpp", "torch.compile", "graphpp's worst"):
        shown.add_column(column, justify="left" if column in ("model", "graphpp's worst") else "right")
    for name, (ours, theirs) in found.items():
        figures = (ours.loss, theirs.loss, ours.gradient, theirs.gradient)
        shown.add_row(name, *(f"{figure:.1e}" for figure in figures), ours.worst if ours.gradient else "")
    return shown


if __name__ == "__main__":
    main()
