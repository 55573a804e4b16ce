"""Buffers and constants that stages of several ranks read must be equal on these ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from tests.distributed import run_ranks

WIDTH = 4


class Scaled(nn.Module):
    def __init__(self, scale: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


class Normed(Scaled):
    """Two ranks write their own statistics."""

    def __init__(self, scale: Tensor) -> None:
        super().__init__(scale)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def outcome(rank: int, kind: str) -> str:
    torch.manual_seed(0)
    drawn = torch.rand(WIDTH, generator=torch.Generator().manual_seed(rank if kind.startswith("other") else 0))
    layer = Normed if kind == "statistics" else Scaled
    model = nn.Sequential(*(layer(torch.ones(WIDTH) if kind == "other constant" else drawn) for _ in range(2)))
    if kind == "other constant":
        for each in model:
            each.register_forward_hook(lambda module, args, output: output * drawn)
    pipe = graphpp.compile(model, F.mse_loss, split=["1"], microbatches=2)
    try:
        for rows in (4, 6):  # the second shape is captured after a step wrote statistics
            pipe.step(*torch.randn(1, rows, WIDTH), target=torch.zeros(rows, WIDTH))
    except graphpp.MismatchError as error:
        return str(error)
    return "equal"


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("kind", ["statistics", "other buffer", "equal", "other constant"])
def test_values_that_ranks_share_are_compared(kind: str) -> None:
    for text in run_ranks(outcome, 2, kind):
        assert "rank 1 differs in the values of" in text if kind.startswith("other") else text == "equal"
