"""Ranks that are in different other groups still find each other in a new group."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp.parallel.groups import Subgroups
from tests.distributed import run_ranks


def overlapping_groups(rank: int) -> list[float]:
    """Each rank's sums over the groups of which it is a member; ranks 0 and 2 are in two groups before the third."""
    groups, sums = Subgroups(dist.group.WORLD), []
    for ranks in ((0, 1), (0, 2), (2, 3), (0, 1, 2, 3), (0, 1)):
        if rank in ranks:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=groups.of(ranks))
            sums.append(total.item())
    return sums


def test_groups_of_some_ranks_may_overlap() -> None:
    assert run_ranks(overlapping_groups, 4) == [[1, 2, 6, 1], [1, 6, 1], [2, 5, 6], [5, 6]]


class TiedTwice(nn.Module):
    """Weights that ranks 0 and 1, 1 and 3, 0 and 2, 2 and 3 share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        for one, other in ((2, 0), (6, 3), (5, 1), (7, 4)):
            self.layers[one].weight = self.layers[other].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.arange(8)


def step(rank: int) -> tuple[float, dict[str, Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    split = [f"layers.{at}" for at in (2, 4, 6)]
    pipe = graphpp.compile(TiedTwice(), F.cross_entropy, split=split, schedule="1F1B", microbatches=4)
    loss = pipe.step(X, target=Y).loss.item()
    return loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}


def test_parameters_that_overlapping_ranks_share_train() -> None:
    loss, gradients = step(0)
    for other, own in run_ranks(step, 4):
        assert other == loss
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name])
