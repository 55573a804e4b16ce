"""Schedules with a split backward: losses, gradients, norms and parameters of three steps equal a plain loop's, bit for bit.

The model has what breaks zero bubble in torch: a weight used twice in one stage with another between, a frozen first
stage, recomputed blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.schedules.generate.read import default_stages
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.reference import adamw
from tests.training import Counting, Numbers, capturing_once, differences, local_grads, whole

MICROBATCHES = 8
LAYERS = 8
SCHEDULES = (
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ZB1P", "ZB2P"),
    *("V-Half", "V-Min", "MegatronInterleaved", "Combined1F1B"),
)
# `make test` proves the others as tables (tests/schedules); 1F1B and Interleaved1F1B train in test_numbers.py.
ON_RANKS = ("ZBVZeroBubble", "DualPipeV")


class Block(nn.Module):
    """A weight used twice, with another one between; a norm whose weight gradient comes with its input's."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm, self.twice, self.between = nn.LayerNorm(d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.twice(F.silu(self.between(self.twice(self.norm(x)))))


class Deep(nn.Module):
    """Blocks between an embedding and a head; the embedding and the first blocks may be frozen."""

    def __init__(self, frozen: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.layers = nn.ModuleList(Block(8) for _ in range(LAYERS))
        for part in (self.embed, *self.layers)[: frozen and frozen + 1]:
            part.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(16, (2 * MICROBATCHES, 4), generator=generator)
    return tokens, tokens.roll(1, 1)


@dataclass(frozen=True)
class Case:
    """One run: schedule, frozen blocks, what is recomputed."""

    schedule: str
    frozen: int = 0
    recompute: Any = None

    def pipe(self, ranks: int) -> graphpp.Pipeline:
        stages = default_stages(self.schedule, ranks)
        split = [f"layers.{stage * LAYERS // stages}" for stage in range(1, stages)]
        chosen = {"split": split, "schedule": self.schedule, "microbatches": MICROBATCHES, "memory": self.recompute}
        return graphpp.compile(Deep(self.frozen), loss, **chosen)

    def train(self, ranks: int) -> Numbers:
        pipe, numbers, optimizer = self.pipe(ranks), Numbers([], [], [], {}, {}), None
        for step in range(3):
            tokens, targets = batch(step)
            numbers.losses.append(pipe.step(tokens, target=targets).losses)
            optimizer = optimizer or adamw([p for p in pipe.parameters() if p.requires_grad])
            numbers.grads.append(local_grads(pipe))
            numbers.norms.append(pipe.clip_grad_norm_(0.5))
            optimizer.step()
            optimizer.zero_grad()
        numbers.params.update((fqn, p.detach().clone()) for fqn, p in pipe.named_parameters())
        return numbers


def train_all(rank: int, ranks: int, cases: Sequence[Case]) -> list[Numbers]:
    """This rank's numbers."""
    with capturing_once():
        return [case.train(ranks) for case in cases]


@cache
def plain(frozen: int) -> Numbers:
    """Gradient accumulation in one eager process."""
    model, numbers = Deep(frozen), Numbers([], [], [], {}, {})
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        tokens, targets = (part.chunk(MICROBATCHES) for part in batch(step))
        losses = []
        for rows, following in zip(tokens, targets, strict=True):
            value = loss(model(rows), following)
            (value / MICROBATCHES).backward()
            losses.append(value.detach())
        numbers.losses.append(torch.stack(losses))
        numbers.grads.append({fqn: None if p.grad is None else p.grad.clone() for fqn, p in model.named_parameters()})
        numbers.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    numbers.params.update((fqn, p.detach()) for fqn, p in model.named_parameters())
    return numbers


def check(ranks: int, cases: Sequence[Case]) -> None:
    each = zip(*run_ranks(train_all, ranks, ranks, cases), strict=True)
    wrong = {str(case): differences(whole(parts), plain(case.frozen)) for case, parts in zip(cases, each, strict=True)}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [(2, ON_RANKS), *further((2, tuple(name for name in SCHEDULES if name not in ON_RANKS)), (4, SCHEDULES))],
    ids=["2", "2 others", "4"],
)
def test_every_schedule_equals_the_plain_loop(ranks: int, schedules: Sequence[str]) -> None:
    check(ranks, [Case(schedule) for schedule in schedules])


@pytest.mark.parametrize(
    ("frozen", "recomputed"),
    [
        (("ZBVZeroBubble",), ("DualPipeV",)),
        *further((("InterleavedZeroBubble", "ZB1P", "DualPipeV"), ("InterleavedZeroBubble", "ZB1P", "ZBVZeroBubble"))),
    ],
    ids=["some", "others"],
)
def test_frozen_stages_and_recomputed_blocks_under_zero_bubble(frozen: Sequence[str], recomputed: Sequence[str]) -> None:
    """torch: the stage after a frozen first one gets no gradients, without a word; checkpointed blocks run K + 2 times."""
    freer = Case("ZBVZeroBubble", 5, graphpp.Recompute(weight_grad=True))
    check(2, [Case(name, 2) for name in frozen] + [Case(name, 0, "full") for name in recomputed] + [freer])


def count(rank: int, schedule: str, recompute: Any) -> Counter[str]:
    pipe = Case(schedule, 0, recompute).pipe(2)
    for step in range(2):
        counting = Counting()
        with counting:
            tokens, targets = batch(step)
            pipe.step(tokens, target=targets)
    return counting.calls


@pytest.mark.parametrize("schedule", ["ZBVZeroBubble", *further("InterleavedZeroBubble")])
def test_a_recomputed_block_runs_forward_twice(schedule: str) -> None:
    once, again = (sum(run_ranks(count, 2, schedule, recompute), Counter()) for recompute in (None, "full"))
    assert once["aten.silu"] == LAYERS * MICROBATCHES
    assert again["aten.silu"] == 2 * LAYERS * MICROBATCHES
    assert again["aten.silu_backward"] == once["aten.silu_backward"] == LAYERS * MICROBATCHES
    linears = again["aten.addmm"] - once["aten.addmm"]
    assert 0 < linears <= 3 * LAYERS * MICROBATCHES  # each of a block's three once more, at most
    assert again["aten.mm"] == once["aten.mm"]  # the gradients' products are none of them doubled
