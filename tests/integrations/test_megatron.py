"""`forward_backward_func` on a pipeline against a plain loop with the arithmetic of Megatron-Core's schedule without stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.integrations.megatron import MegatronModel, get_forward_backward_func
from tests.distributed import rank_outcomes, run_ranks


class Net(nn.Module):
    """Returns the loss of each position, as Megatron-Core's GPTModel with labels does."""

    def __init__(self, per_token: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.config = SimpleNamespace(calculate_per_token_loss=per_token)
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return F.cross_entropy(self.head(hidden).transpose(1, 2), labels, reduction="none")


def batches(count: int, seed: int = 0) -> Iterator[dict[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(16, (2, 6), generator=random)
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": (torch.rand(2, 5, generator=random) < 0.7).float()}


def token_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The loss function of Megatron-LM's pretrain_gpt.py, in its form of today."""
    loss = torch.sum(output.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().detach().to(torch.int)
    reported = torch.cat([loss.detach().view(1), tokens.view(1)])
    return loss, tokens, {"lm loss": reported, "pair": (loss.detach(), tokens)}


def mean_loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = torch.sum(output * loss_mask) / loss_mask.sum()
    return loss, {"lm loss": loss.detach()}


def forward_step(loss: Any, data_iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    batch = next(data_iterator)
    output = model(batch["tokens"].contiguous(), labels=batch["labels"].contiguous())
    return output, partial(loss, batch["loss_mask"])


STEPS = {"tokens": partial(forward_step, token_loss), "mean": partial(forward_step, mean_loss)}


def plain_func(*, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool = False) -> Any:
    """The losses and gradients of Megatron-Core's schedule without a pipeline."""
    reported, total = [], torch.zeros((), dtype=torch.int)
    for _ in range(num_microbatches):
        with torch.set_grad_enabled(not forward_only):
            output, loss_func = forward_step_func(data_iterator, model)
            loss, *tokens, report = loss_func(output)
        reported.append(report)
        if tokens:
            total += tokens[0]
        if not model.config.calculate_per_token_loss:
            loss = loss / (tokens[0].clamp(min=1) if tokens else 1) / num_microbatches
        if not forward_only:
            loss.backward()
    if model.config.calculate_per_token_loss and not forward_only:
        for parameter in model.parameters():
            parameter.grad.div_(total)
    return reported


def trained(func: Any, model: Any, step: Any, data: Any, clip: Any, optimizer: Any = None) -> tuple[list[Any], list[float]]:
    """Three steps and an evaluation, as a training loop around Megatron-Core's function has them."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-2)
    found, norms = [], []
    for at in range(3):
        optimizer.zero_grad()
        items = data(4, at)
        found.append(func(forward_step_func=step, data_iterator=items, model=model, num_microbatches=4, forward_only=False))
        norms.append(float(clip(model)))
        optimizer.step()
    model.eval()
    found.append(func(forward_step_func=step, data_iterator=data(2, 9), model=model, num_microbatches=2, forward_only=True))
    return found, norms


CASES = [("tokens", False), ("mean", False), ("tokens", True)]


def pipelined(rank: int, ranks: int, given: Sequence[int]) -> list[Any]:
    results = []
    for name, per_token in CASES:
        model = MegatronModel(Net(per_token), pipeline={"schedule": "1F1B"})
        data = lambda count, seed: [batches(count, seed)] if rank in given else None  # noqa: E731
        clip = lambda model: model.pipe.clip_grad_norm_(1.0)  # noqa: E731
        found = trained(get_forward_backward_func(), model, STEPS[name], data, clip)
        results.append((*found, model.pipe.gather()))
    return results


def check_equal(found: Sequence[Any], expected: Sequence[Any]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            pairs = zip(mine[name], value, strict=True) if isinstance(value, tuple) else [(mine[name], value)]
            assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in pairs), name


@pytest.mark.parametrize(("ranks", "given"), [(2, (0, 1)), (3, (0, 2)), (1, (0,))])
def test_losses_norms_and_weights_are_those_of_a_plain_loop(ranks: int, given: Sequence[int]) -> None:
    """Bit-equal, also where a rank in the middle has no data iterator."""
    own = run_ranks(pipelined, ranks, ranks, given) if ranks > 1 else [pipelined(0, 1, given)]
    for at, (name, per_token) in enumerate(CASES):
        net = Net(per_token)
        clip = lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
        reports, norms = trained(plain_func, net, STEPS[name], batches, clip)
        for rank, each in enumerate(own):
            found, clipped, weights = each[at]
            assert clipped == norms
            for mine, theirs in zip(found, reports, strict=True):
                check_equal(mine, theirs if rank == ranks - 1 else [])
            if rank == 0:
                assert all(torch.equal(weights[fqn], value) for fqn, value in net.state_dict().items())
