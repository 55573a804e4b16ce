"""Train a small Llama on real text over several processes, then compare the numbers with one plain process.

    torchrun --nproc-per-node 2 examples/train_llama.py          (`make demo` does this)
    torchrun --nproc-per-node 2 examples/train_llama.py --backend inductor --steps 200
    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_llama.py --folder run --every 5

Every rank gets the same batch; graphpp cuts the batch into microbatches and the model into stages. Half of the way the
training is saved, and another pipeline, with other stages and another schedule, loads the checkpoint and goes on. Afterwards
rank 0 trains the same model with PyTorch alone, and the exit status is 1 if one loss or one parameter differs.
With --folder a job that was cut off, by the death of a rank for instance, goes on from its latest checkpoint when it is
started again, on the same or another number of ranks.
A compiling backend reorders sums; with such a backend the losses of the last step must agree to --tolerance.
"""

import argparse
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import llama
import text
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

import graphpp

Update = Callable[[Tensor, Tensor], Tensor]  # tokens, targets [rows, length] -> the losses of the microbatches
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Run:
    """The results of one training."""

    losses: Tensor  # [steps, microbatches]
    seconds: list[float]  # per step
    state: dict[str, Tensor]  # of the trained model; empty on ranks other than 0

    @property
    def speed(self) -> float:
        """Median seconds of a step; the median leaves out the first step, which traces and warms up."""
        return sorted(self.seconds)[len(self.seconds) // 2]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50, help="2 or more: half of them before the checkpoint")
    parser.add_argument("--folder", type=Path, help="for checkpoints, kept afterwards; a second start goes on from there")
    parser.add_argument("--every", type=int, help="steps from one checkpoint to the next; half of all steps by default")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=320, help="a multiple of 64")
    parser.add_argument("--batch", type=int, default=16, help="rows, a multiple of the microbatches")
    parser.add_argument("--length", type=int, default=64, help="bytes in a row")
    parser.add_argument("--schedule", default="1F1B", help="GPipe, 1F1B, Interleaved1F1B, LoopedBFS or a CSV file")
    parser.add_argument("--resume", default="Interleaved1F1B", help="the schedule of the second half")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="nats, for backends other than eager")
    parser.add_argument("--lr", type=float, default=1e-4, help="at 1e-3 training is chaotic: rounding decides the loss")
    option = parser.parse_args()
    option.every = option.every or (option.steps + 1) // 2
    if option.steps < 2 or option.every < 1:
        parser.error("--steps: 2 or more, half of them before the checkpoint; --every: 1 or more")
    return option


def main() -> None:
    option = options()
    device = prepare(option.device)
    piped = train_pipeline(option, device)
    if dist.is_initialized():
        dist.destroy_process_group()
    if RANK == 0:
        plain = train_plain(option, device)
        show_speed(piped, plain)
        sys.exit(show_difference(piped, plain, 0.0 if option.backend == "eager" else option.tolerance))


def prepare(choice: str) -> torch.device:
    """The device of this rank. Also sets one thread per rank, and deterministic kernels."""
    torch.set_num_threads(1)
    if choice == "cpu" or (choice == "auto" and torch.cuda.device_count() < RANKS):
        return torch.device("cpu")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


# ------------------------------------------------------------------------------------------------------- two trainings


def train_pipeline(option: argparse.Namespace, device: torch.device) -> Run:
    """The training with graphpp, in two halves; every rank calls this function, and holds the parameters of its own stages."""
    folder = option.folder or Path(tempfile.gettempdir()) / f"graphpp-{os.environ.get('MASTER_PORT', os.getpid())}"
    if RANK == 0 and option.folder is None:
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier job that was cut off; the others look later
    half = option.steps // 2
    first = train_until(half, option, device, option.schedule, folder)
    second = train_until(option.steps, option, device, option.resume, folder)
    if RANK == 0 and option.folder is None:
        shutil.rmtree(folder)
    return Run(second.losses, first.seconds + second.seconds, second.state)


def train_until(stop: int, option: argparse.Namespace, device: torch.device, schedule: str, folder: Path) -> Run:
    """The training up to a step, from the latest checkpoint in `folder` if there is one; the state goes there."""
    pipe = graphpp.compile(
        new_model(option),
        llama.loss,
        example=example(option),
        schedule=schedule,
        microbatches=option.microbatches,
        parallel=graphpp.Parallel(device=device),
        backend=option.backend,
    )
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=option.lr)
    checkpoint = pipe.checkpoint(optimizer, extra={"losses": []})
    checkpoint.load(folder, missing_ok=True)

    def update(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        result = pipe.step(tokens, target=targets)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        return torch.stack(list(result.losses))

    seconds = []
    while pipe.steps < stop:
        steps = range(pipe.steps, min(pipe.steps + option.every, stop))
        losses, taken = train(f"{schedule} x {RANKS}", update, option, steps, device, lambda: bubble(pipe, option))
        checkpoint.extra["losses"] += losses.tolist()
        seconds += taken
        checkpoint.save(folder)
    return Run(torch.tensor(checkpoint.extra["losses"]), seconds, pipe.gather())


def example(option: argparse.Namespace) -> graphpp.Microbatch:
    """One microbatch of the training: graphpp reads its shapes and does not run the model on it."""
    rows = option.batch // option.microbatches
    tokens, targets = text.batch(text.corpus(), 0, rows, option.length)
    return graphpp.Microbatch((tokens,), target=targets)


def train_plain(option: argparse.Namespace, device: torch.device) -> Run:
    """The same training in one process, with gradient accumulation and without graphpp."""
    model = new_model(option).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=option.lr)

    def update(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses = []
        for rows, following in zip(tokens.chunk(option.microbatches), targets.chunk(option.microbatches), strict=True):
            loss = llama.loss(model(rows), following)
            (loss / option.microbatches).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return torch.stack(losses)

    losses, seconds = train("one process", update, option, range(option.steps), device, lambda: 0.0)
    return Run(losses, seconds, on_cpu(model.state_dict()))


def new_model(option: argparse.Namespace, seed: int = 0) -> nn.Module:
    """A new model, with the same parameters on every rank."""
    torch.manual_seed(seed)
    return llama.Llama(llama.Config(option.dim, option.layers, heads=option.dim // 64)).apply(llama.initialise)


def train(
    title: str,
    update: Update,
    option: argparse.Namespace,
    steps: range,
    device: torch.device,
    bubble: Callable[[], float],
) -> tuple[Tensor, list[float]]:
    """Call `update` on the batch of every step and show progress; returns losses [steps, microbatches] and seconds per step."""
    losses, seconds = [], []
    data = text.corpus()
    with progress(title, len(steps)) as show:
        for step in steps:
            tokens, targets = text.batch(data, step, option.batch, option.length)
            began = time.perf_counter()
            losses.append(update(tokens.to(device), targets.to(device)).cpu())
            seconds.append(time.perf_counter() - began)
            speed = tokens.numel() / seconds[-1]
            show(f"loss {losses[-1].mean():.3f}  {speed:5.0f} tokens/s  bubble {bubble():3.0%}")
    return torch.stack(losses), seconds


# ------------------------------------------------------------------------------------------------------------- results


def on_cpu(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().cpu() for name, value in state.items()}


def bubble(pipe: object, option: argparse.Namespace) -> float:
    """The share of a step in which a rank waits: measured if the pipeline has a measurement, else the lower bound.

    The bound is (W-1) / (v M + W-1) for W ranks, v stages on each and M microbatches (Narayanan et al. 2021).
    """
    measured = getattr(pipe, "bubble", None)
    if isinstance(measured, float):
        return measured
    stages = 2 if option.schedule in ("Interleaved1F1B", "LoopedBFS") else 1
    return (RANKS - 1) / (stages * option.microbatches + RANKS - 1)


def show_speed(piped: Run, plain: Run) -> None:
    """Print the speed-up over one process, and the share of time in which the ranks did not compute."""
    if not piped.seconds:
        return  # the training had ended before
    ratio = plain.speed / piped.speed
    print(f"speed: {ratio:.2f} x one process; ranks waited, sent and prepared {1 - ratio / RANKS:.0%} of their time")


def show_difference(piped: Run, plain: Run, tolerance: float) -> int:
    """Print the largest differences. Returns the exit status: 0 if none, or the last losses agree to `tolerance` > 0."""
    if piped.state.keys() != plain.state.keys():
        print(f"not in both runs: {sorted(piped.state.keys() ^ plain.state.keys())}")
        return 1
    apart = (piped.losses - plain.losses).abs()
    parameters = torch.stack([(piped.state[name] - plain.state[name]).abs().max() for name in plain.state]).max().item()
    print(f"largest difference from one plain process: losses {apart.max():g}, parameters {parameters:g}")
    if tolerance == 0:
        return 0 if apart.max() == 0 and parameters == 0 else 1
    last = (piped.losses[-1].mean() - plain.losses[-1].mean()).abs().item()
    print(f"loss of the last step: {piped.losses[-1].mean():.5f}, one plain process {plain.losses[-1].mean():.5f}")
    return 0 if last <= tolerance else 1  # a NaN fails


@contextmanager
def progress(title: str, steps: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on rank 0, advanced by each call with a text; lines of text where the output is no terminal."""
    console = Console(quiet=RANK != 0)
    columns = (TextColumn(f"{title:12}"), BarColumn(24), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=steps)
        lines = itertools.count(1)

        def show(message: str) -> None:
            bar.update(task, advance=1, description=message)
            step = next(lines)
            if not console.is_terminal and (step % max(1, steps // 10) == 0 or step == 1):
                console.print(f"{title:12} step {step:4}/{steps}  {message}", highlight=False, soft_wrap=True)

        yield show


if __name__ == "__main__":
    main()
