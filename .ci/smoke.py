"""Train a small model with the installed graphpp, alone or under torchrun. Argument: the folder that must hold graphpp."""

import importlib
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import graphpp


def main() -> None:
    assert Path(graphpp.__file__).is_relative_to(Path(sys.argv[1])), f"graphpp comes from {graphpp.__file__}"
    for decoy in ("passes", "runtime"):
        must_raise(decoy)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(8, 8), nn.Tanh())))
    inputs, target = torch.randn(8, 8), torch.randn(8, 8)
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4)
    losses = [train(pipe, inputs, target) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2], losses
    page = pipe.report("report")  # the files of the page are in the wheel
    assert "echarts" in page.read_text(encoding="utf-8")
    print(f"graphpp runs from {Path(graphpp.__file__).parent}, losses {losses}")
    if dist.is_initialized():
        dist.destroy_process_group()  # gloo's threads may abort a process that ends with a living group


def must_raise(decoy: str) -> None:
    """Raise AssertionError unless importing `decoy` raises: then the decoy folder is in place."""
    try:
        importlib.import_module(decoy)
    except ImportError as error:
        assert "own" in str(error), error
    else:
        raise AssertionError(f"{decoy} is not the decoy")


def train(pipe: graphpp.Pipeline, inputs: torch.Tensor, target: torch.Tensor) -> float:
    """Run one step of plain gradient descent; returns the loss before the step."""
    loss = pipe.step(inputs, target=target).loss.item()
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return loss


if __name__ == "__main__":
    main()
