"""Compare the optimizer's part of a step with and without waiting for the norm of all gradients.

    torchrun --nproc-per-node 2 benchmarks/post_validation.py [--dim 256] [--optimizers AdamW SGD] [--late 10]

Two contenders over one pipeline's gradients, in turn: `pipe.clip_grad_norm_` and `optimizer.step()`, and
`graphpp.PostValidation.step()`. Medians over rounds of the slowest rank's time from a barrier; the ratio is the median of
the rounds' ratios, below 1 where post-validation is faster.

    plain      all ranks begin together, nothing is clipped
    late       the same, but rank 0 begins --late milliseconds after the others, as ranks leave a schedule
    clipped    all begin together; the norm demands clipping, which no rank can tell by itself: optimistic steps are rolled back
    step       forward, backward and optimizer, nothing clipped

At most the time of the all-reduce on the last rank can be won: the next `pipe.step` begins with an
agreement of all ranks, so a rank that is done early waits there instead. A late rank finds the norm already reduced and
steps as without post-validation (ratio 1). Where the norm demands clipping, the copy of parameters and state and one step
are lost. On few cores every process pays for the copies, because no core is free to copy while others compute.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from harness import RANK, RANKS, Contender, alternate, median_ratio, medians, start
from models import Llama, llama_small, loss
from rich.console import Console
from rich.table import Table
from torch import Tensor

import graphpp

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-5),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=1e-5, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-5, momentum=0.9),
}


@dataclass(frozen=True)
class Record:
    """One line: milliseconds of both contenders, their ratio, and the optimistic and rolled-back steps over all ranks."""

    optimizer: str
    case: str
    synchronous: float
    validated: float
    ratio: float
    taken: int
    rolled_back: int


@dataclass(frozen=True)
class Bench:
    """A pipeline after a backward, and copies of its gradients."""

    pipe: graphpp.Pipeline
    batch: tuple[Tensor, Tensor]
    gradients: list[Tensor]

    @classmethod
    def of(cls, dim: int, device: torch.device) -> Bench:
        torch.manual_seed(0)
        model = Llama(llama_small(dim))
        tokens = torch.randint(256, (8, 65), generator=torch.Generator().manual_seed(1)).to(device)
        batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        cuts = [f"layers.{stage * 8 // RANKS}" for stage in range(1, RANKS)]
        pipe = graphpp.compile(
            model, loss, split=cuts or None, schedule="1F1B", microbatches=8, parallel=graphpp.Parallel(device=device)
        )
        pipe.step(batch[0], target=batch[1])
        return cls(pipe, batch, [p.grad.clone() for p in pipe.parameters() if p.grad is not None])

    def give_gradients(self) -> None:
        """Restore the gradients that clipping has changed."""
        present = [p for p in self.pipe.parameters() if p.grad is not None]
        for parameter, gradient in zip(present, self.gradients, strict=True):
            parameter.grad.copy_(gradient)

    def forget_gradients(self) -> None:
        for parameter in self.pipe.parameters():
            parameter.grad = None

    def train(self, end: Callable[[], object]) -> None:
        self.pipe.step(self.batch[0], target=self.batch[1])
        end()


def main() -> None:
    option = options()
    device = start()
    bench = Bench.of(option.dim, device)
    norm = bench.pipe.clip_grad_norm_(1e9).item()
    records = [
        measured(bench, optimizer, case, norm, option)
        for optimizer in option.optimizers
        for case in ("plain", "late", "clipped", "step")
    ]
    if RANK == 0:
        Console(width=120).print(shown(records))
        if option.json:
            Path(option.json).write_text(json.dumps([vars(record) for record in records]))
    if RANKS > 1:
        dist.destroy_process_group()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=["AdamW", "AdamW fused", "SGD"])
    parser.add_argument("--late", type=float, default=10.0, help="milliseconds")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--json", help="file for the records")
    return parser.parse_args()


def measured(bench: Bench, name: str, case: str, norm: float, option: argparse.Namespace) -> Record:
    """One line of the table; three rounds warm up."""
    max_norm = 0.95 * norm if case == "clipped" else 1e9
    params = list(bench.pipe.parameters())
    optimizer, other = OPTIMIZERS[name](params), OPTIMIZERS[name](params)
    validation = graphpp.PostValidation(bench.pipe, other, max_norm)

    def synchronous() -> None:
        bench.pipe.clip_grad_norm_(max_norm)
        optimizer.step()

    def contender(end: Callable[[], object]) -> Contender:
        if case == "step":
            return Contender(lambda: bench.train(end), bench.forget_gradients)
        return Contender(late(end, option.late) if case == "late" and RANK == 0 else end, bench.give_gradients)

    both = {"synchronous": contender(synchronous), "validated": contender(validation.step)}
    found = {way: samples[3:] for way, samples in alternate(both, option.rounds + 3, bench.batch[0].device).items()}
    counts = torch.tensor([validation.taken, validation.rolled_back], device=bench.batch[0].device)
    if RANKS > 1:
        dist.all_reduce(counts)
    milliseconds = [1e3 * medians(samples).seconds for samples in found.values()]
    ratio = median_ratio(found["validated"], found["synchronous"])
    return Record(name, case, *milliseconds, ratio, *map(int, counts.tolist()))


def late(end: Callable[[], object], milliseconds: float) -> Callable[[], object]:
    def run() -> object:
        time.sleep(milliseconds / 1e3)
        return end()

    return run


def shown(records: list[Record]) -> Table:
    table = Table(title=f"{RANKS} ranks: ms of the slowest rank", title_justify="left")
    for column in ("optimizer", "case", "synchronous", "validated", "ratio", "taken ahead", "taken back"):
        table.add_column(column, justify="left" if column in ("optimizer", "case") else "right")
    for record in records:
        figures = (f"{record.synchronous:.2f}", f"{record.validated:.2f}", f"{record.ratio:.2f}")
        table.add_row(record.optimizer, record.case, *figures, str(record.taken), str(record.rolled_back))
    return table


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*barrier.*")
    main()
