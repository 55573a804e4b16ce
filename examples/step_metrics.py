"""The numbers of each training step in TensorBoard or Weights & Biases, by the writer of each.

    torchrun --nproc-per-node 2 examples/step_metrics.py --writer tensorboard --folder runs
    WANDB_MODE=offline torchrun --nproc-per-node 2 examples/step_metrics.py --writer wandb --folder runs

Each rank writes its own numbers as a run of its own, `rank0`, `rank1`, ..: the seconds that it waited differ from rank to rank.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

import graphpp

RANK = int(os.environ.get("RANK", "0"))
Write = Callable[[int, dict[str, float]], object]  # the number of the step, its numbers by name


@contextmanager
def tensorboard(folder: Path) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(folder / f"rank{RANK}") as writer:

        def write(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(f"step/{name}", value, step)

        yield write


@contextmanager
def wandb(folder: Path) -> Iterator[Write]:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    with wandb.init(project="graphpp", dir=folder, group="steps", name=f"rank{RANK}") as run:
        yield lambda step, numbers: run.log(numbers, step=step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writer", choices=["tensorboard", "wandb"], default="tensorboard")
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    example = graphpp.Microbatch((x[:4],), target=y[:4])
    pipe = graphpp.compile(model, nn.functional.mse_loss, example=example, split=["2"], microbatches=8)
    optimizer = torch.optim.AdamW(pipe.parameters(), 1e-2)

    with {"tensorboard": tensorboard, "wandb": wandb}[options.writer](options.folder) as write:

        def hook(metrics: graphpp.StepMetrics) -> None:
            numbers = asdict(metrics)
            write(metrics.step, {name: value for name, value in numbers.items() if isinstance(value, int | float)})

        with pipe.register_step_hook(hook):
            for _ in range(options.steps):
                pipe.step(x, target=y)
                pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()


if __name__ == "__main__":
    main()
