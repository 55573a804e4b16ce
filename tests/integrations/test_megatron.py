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
from tests.distributed import run_ranks


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
        mask = (torch.rand(2, 5, generator=random) < 0.7).float()
        yield {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


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


def plain_func(
    *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool = False
) -> Any:
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


@pytest.mark.first_cases(1)
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


def sharing(rank: int) -> Any:
    """A fault of one rank, and a checkpoint that is loaded before the first call."""
    model = MegatronModel(Net(), {"schedule": "1F1B"}, forward_step_func=STEPS["mean"], example=next(batches(1)))
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], 1e-2)
    model.pipe.checkpoint(optimizer)
    func = get_forward_backward_func()
    data = batches(1) if rank == 1 else batches(2)
    try:
        func(forward_step_func=STEPS["mean"], data_iterator=data, model=model, num_microbatches=2)
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
    later = func(forward_step_func=STEPS["mean"], data_iterator=batches(2), model=model, num_microbatches=2)
    return first, len(later), [fqn for fqn, _ in model.named_parameters()]


def test_a_fault_of_one_rank_is_raised_on_all_and_an_example_is_captured_at_once() -> None:
    (one, none, first), (other, two, second) = run_ranks(sharing, 2)
    assert "rank 1: StopIteration" in one
    assert "StopIteration" in other
    assert (none, two) == (0, 2)
    assert sorted([*first, *second]) == sorted(Net().state_dict())


def draws_nothing(data_iterator: Any, model: Any) -> Any:
    batch = next(batches(1))
    return model(batch["tokens"], labels=batch["labels"]), partial(mean_loss, batch["loss_mask"])


def calls_twice(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    twice = [model(batch["tokens"], labels=batch["labels"]) for _ in range(2)]
    return twice[0] + twice[1], partial(mean_loss, batch["loss_mask"])


def calls_none(data_iterator: Any, model: Any) -> Any:
    return next(data_iterator)["tokens"].float(), partial(mean_loss, 1)


def reports_all(data_iterator: Any, model: Any) -> Any:
    batch = next(data_iterator)
    output = model(batch["tokens"], labels=batch["labels"])
    return output, lambda output: (output.mean(), {"all": output.detach().repeat(100, 1)})


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        (draws_nothing, {}, "took nothing from data_iterator"),
        (calls_none, {}, "does not call the model"),
        (calls_twice, {}, "forward_step_func calls the model more than once"),
        (reports_all, {}, "reports 'all' of 1000 numbers"),
        (STEPS["mean"], {"model": [Net(), Net()]}, "model: a list of 2"),
        (STEPS["mean"], {"model": Net()}, "model: give a MegatronModel, got Net"),
        (STEPS["mean"], {"collect_non_loss_data": True}, "collect_non_loss_data does not go with"),
        (STEPS["mean"], {"p2p_communicator": 1}, "p2p_communicator does not go with"),
        (STEPS["mean"], {"data_iterator": None}, "no rank was given microbatches"),
    ],
)
def test_refusals(step: Any, changes: Any, words: str) -> None:
    given = {"data_iterator": batches(2), "model": MegatronModel(Net()), "num_microbatches": 2, **changes}
    with pytest.raises(graphpp.GraphPPError, match=words):
        get_forward_backward_func()(forward_step_func=step, **given)


def test_settings_of_the_model_are_refused_by_name() -> None:
    for name, value in {"grad_scale_func": lambda loss: 2 * loss, "finalize_model_grads_func": print}.items():
        net = Net()
        setattr(net.config, name, value)
        with pytest.raises(graphpp.GraphPPError, match=f"config.{name} does not go with"):
            get_forward_backward_func()(
                forward_step_func=STEPS["mean"], data_iterator=batches(1), model=MegatronModel(net), num_microbatches=1
            )
    with pytest.raises(graphpp.GraphPPError, match=r"pipeline\['gradients'\] does not go with"):
        MegatronModel(Net(), {"gradients": "sum"})
    per_token = MegatronModel(Net(per_token=True))
    with pytest.raises(graphpp.GraphPPError, match=r"needs \(loss, num_tokens, dict\)"):
        get_forward_backward_func()(
            forward_step_func=STEPS["mean"], data_iterator=batches(1), model=per_token, num_microbatches=1
        )
    model = MegatronModel(Net())
    func = get_forward_backward_func()
    func(forward_step_func=STEPS["mean"], data_iterator=batches(1), model=model, num_microbatches=1)
    with pytest.raises(graphpp.GraphPPError, match="define one function outside of the loop"):
        func(forward_step_func=STEPS["tokens"], data_iterator=batches(1), model=model, num_microbatches=1)


def test_a_step_without_a_token_has_gradients_of_zero() -> None:
    model = MegatronModel(Net(per_token=True), pipeline={"schedule": "1F1B"})
    data = ({**each, "loss_mask": torch.zeros_like(each["loss_mask"])} for each in batches(2))
    get_forward_backward_func()(forward_step_func=STEPS["tokens"], data_iterator=data, model=model, num_microbatches=2)
    gradients = [each.grad for each in model.parameters()]
    assert all(each is not None and not each.any() for each in gradients) and len(gradients) == 11
