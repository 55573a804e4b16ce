"""Experts over ranks: the answers and gradients of a loop over all experts in one process, in eager and under schedules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpp.errors import GraphPPError
from graphpp.experts import routed
from tests.distributed import run_ranks

EXPERTS, TOKENS, WIDTH, CHOICES = 4, 10, 6, 2


def inputs(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens and weights of a rank, the experts that they choose (the first one often), and the weights of all experts."""
    generator = torch.Generator().manual_seed(rank)
    tokens, weights = torch.randn(TOKENS, WIDTH, generator=generator), torch.rand(TOKENS, CHOICES, generator=generator)
    wanted = torch.randn(TOKENS, EXPERTS, generator=generator) + torch.tensor([2.0, 0, 0, 0])
    experts = torch.randn(EXPERTS, WIDTH, 3, generator=torch.Generator().manual_seed(99))
    return tokens.requires_grad_(), wanted.topk(CHOICES).indices, weights.requires_grad_(), experts.requires_grad_()


def looped(tokens: Tensor, chosen: Tensor, weights: Tensor, experts: Tensor, capacity: int | None) -> Tensor:
    """The same by a loop over the tokens."""
    taken, rows = dict.fromkeys(range(EXPERTS), 0), []
    for token, choices, shares in zip(tokens, chosen.tolist(), weights, strict=True):
        row = torch.zeros(3)
        for expert, share in zip(choices, shares, strict=True):
            if capacity is None or taken[expert] < capacity:
                row = row + share * (token @ experts[expert])
            taken[expert] += 1
        rows.append(row)
    return torch.stack(rows)


def answered(rank: int, ranks: int, capacity: int | None) -> list[Tensor | None]:
    """A rank's output, and the gradients of its tokens, of its weights and of its experts."""
    torch.set_num_threads(1)
    tokens, chosen, weights, experts = inputs(rank)
    own = experts.detach().chunk(ranks)[rank].clone().requires_grad_()
    group = dist.group.WORLD if ranks > 1 else None
    out = routed(tokens, chosen, weights, lambda x: torch.bmm(x, own), EXPERTS, group, capacity=capacity)
    (out * out).sum().backward()
    return [out.detach(), tokens.grad, weights.grad, own.grad]


@pytest.mark.parametrize("capacity", [None, 3, 1])
@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_and_gradients_are_those_of_a_loop(ranks: int, capacity: int | None) -> None:
    found = run_ranks(answered, ranks, ranks, capacity) if ranks > 1 else [answered(0, 1, capacity)]
    of_experts = []
    for rank, (out, *grads) in enumerate(found):
        tokens, chosen, weights, experts = inputs(rank)
        expected = looped(tokens, chosen, weights, experts, capacity)
        (expected * expected).sum().backward()
        of_experts.append(experts.grad)
        for mine, theirs in zip((out, *grads[:2]), (expected.detach(), tokens.grad, weights.grad), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    together = torch.cat([grads[3] for grads in found])
    torch.testing.assert_close(together, sum(of_experts), rtol=1e-5, atol=1e-6)


def test_a_token_that_chooses_an_expert_twice_is_not_dropped_without_a_word() -> None:
    tokens, _, weights, experts = inputs(0)
    twice = torch.ones(TOKENS, CHOICES, dtype=torch.int64)
    assert routed(tokens, twice, weights, lambda x: torch.bmm(x, experts), EXPERTS).isnan().any()


def refusals(rank: int) -> None:
    tokens, chosen, weights, _ = inputs(rank)
    group = dist.group.WORLD
    calls: list[Callable[[], object]] = [
        lambda: routed(tokens[0], chosen, weights, torch.relu, EXPERTS),
        lambda: routed(tokens, chosen[1:], weights[1:], torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, weights[:, :1], torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, chosen, torch.relu, EXPERTS),
        lambda: routed(tokens, chosen[:, :0], weights[:, :0], torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, weights, lambda x: (x, x), EXPERTS),  # type: ignore[arg-type,return-value]
        lambda: routed(tokens, chosen.float(), weights, torch.relu, EXPERTS),
        lambda: routed(tokens, chosen, weights, torch.relu, EXPERTS + 1, group),
        lambda: routed(tokens, chosen, weights, lambda x: x[:, 1:], EXPERTS),
        lambda: routed(tokens, chosen, weights, torch.relu, EXPERTS, 3),  # type: ignore[arg-type]
        lambda: routed(tokens, chosen, weights, torch.relu, EXPERTS, capacity=0),
    ]
    for call in calls:
        with pytest.raises(GraphPPError):
            call()
    for wrong, number in ((chosen + EXPERTS, 2 * EXPERTS - 1), (chosen - 1, -1)):
        with pytest.raises(GraphPPError, match=f"chosen: take experts from 0 to 3, numbered over all ranks, got {number}$"):
            routed(tokens, wrong, weights, torch.relu, EXPERTS)
    with pytest.raises(GraphPPError, match=r"tokens: take .*flatten\(0, 1\).*, got a tensor \[2, 5, 6\] of torch.float32"):
        routed(tokens.unflatten(0, (2, 5)), chosen, weights, torch.relu, EXPERTS)


def test_wrong_arguments_are_refused() -> None:
    run_ranks(refusals, 2)
