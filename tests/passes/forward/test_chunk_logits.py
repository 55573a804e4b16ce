"""Heads whose logits exist for some tokens at a time: the numbers of a head with all logits, and the bytes that are saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp._torch.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY
from graphpp.errors import CaptureError
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.models import MODELS
from tests.training import step, unequal

WIDTH, WORDS, ROWS, LENGTH = 6, 11, 8, 5


def operator(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tokens: int, **options: Any) -> Tensor:
    given = {"ignore_index": -100, "mean": True, "smoothing": 0.0, "scale": 1.0, **options}
    loss, *_ = LINEAR_CROSS_ENTROPY(hidden, weight, bias, target, *given.values(), hidden.dtype, tokens, [True] * 3)
    return loss


@pytest.mark.parametrize("tokens", [1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"mean": False}, {"smoothing": 0.2}, {"scale": 0.3}, {"ignore_index": 4, "smoothing": 0.1, "mean": False}]
)
def test_the_operator_has_the_gradients_of_torch(tokens: int, bias: bool, options: dict[str, Any]) -> None:
    shapes = [(13, WIDTH), (WORDS, WIDTH), (WORDS,)]
    hidden, weight, offset = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes)
    ignored = options.get("ignore_index", -100)
    target = torch.randint(WORDS, (13,)).index_fill(0, torch.tensor([2, 5]), ignored)
    operands = (hidden, weight, *[offset] * bias)
    logits = F.linear(*operands) * options.get("scale", 1.0)
    reduction, smoothing = "mean" if options.get("mean", True) else "sum", options.get("smoothing", 0.0)
    expected = F.cross_entropy(logits, target, ignore_index=ignored, reduction=reduction, label_smoothing=smoothing)
    found = operator(hidden, weight, offset if bias else None, target, tokens, **options)
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(*(torch.autograd.grad(3 * each, operands) for each in (found, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_mean_over_no_token_is_nan_as_in_torch() -> None:
    hidden, weight = torch.randn(3, WIDTH, requires_grad=True), torch.randn(WORDS, WIDTH, requires_grad=True)
    found = operator(hidden, weight, None, torch.full((3,), -100), 2)
    assert found.isnan() and torch.autograd.grad(found, hidden)[0].isnan().all()


class Head(nn.Module):
    """An embedding, a layer and a head; `after` is applied to the logits [rows, length, words]."""

    def __init__(self, after: Callable[[Tensor], Tensor] = lambda logits: logits, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layer, self.after = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), after
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(self.head(torch.tanh(self.layer(self.embed(tokens)))))


def flat(logits: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].contiguous().view(-1, WORDS).float(), target[:, 1:].reshape(-1), reduction="sum")


def batch(length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(WORDS, (ROWS, length), generator=generator)
    return tokens, tokens.roll(1, 1).masked_fill(tokens == 3, -100)


Numbers = dict[str, Tensor | None]


def trained(
    model: nn.Module, loss: Any, logits_tokens: int | None, lengths: tuple[int, ...] = (LENGTH,), **options: Any
) -> Numbers:
    memory = graphpp.Memory(logits_tokens=logits_tokens)
    pipe = graphpp.compile(model, loss, **{"split": ["head"], "microbatches": 2, "memory": memory, **options})
    losses = list[Tensor]()
    for length in lengths:
        tokens, target = batch(length)
        losses += [pipe.step(tokens, target=target).losses, pipe.eval(tokens, target=target).losses]
    chunked = any("linear_cross_entropy" in item.source for item in pipe.programs(1).programs.values())
    assert chunked == (logits_tokens is not None)
    return {"losses": torch.cat(losses), **{fqn: each.grad for fqn, each in pipe.named_parameters()}}


LOSSES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "flattened": (Head, flat),
    "shifted, in float32, a sum": (Head, shifted),
    "a bias, scaled logits": (lambda: Head(lambda logits: logits / 3.0, bias=True), flat),
    "smoothed": (Head, lambda logits, target: flat(logits, target, label_smoothing=0.1)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_training_has_the_numbers_of_all_logits(name: str) -> None:
    make, loss = LOSSES[name]
    expected = trained(make(), loss, None)
    torch.testing.assert_close(trained(make(), loss, 3), expected)


@pytest.mark.exhaustive
@pytest.mark.parametrize("change", ["autocast", "frozen head", "lengths", "bfloat16", "inductor"])
def test_a_training_under(change: str) -> None:
    def one(logits_tokens: int | None) -> Numbers:
        model = Head()
        model.head.requires_grad_(change != "frozen head")
        model.to(torch.bfloat16 if change == "bfloat16" else torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            lengths = (5, 4, 6) if change == "lengths" else (LENGTH,)
            return trained(model, flat, logits_tokens, lengths, backend="inductor" if change == "inductor" else "eager")

    tolerance = {"rtol": 3e-2, "atol": 3e-3} if change in ("autocast", "bfloat16") else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(one(3), one(None), **tolerance)


@pytest.mark.parametrize("name", ["hf_llama_labels", *further("llama", "hf_llama", "hf_gpt2", "hf_gpt2_labels")])
def test_models_and_their_own_losses(name: str) -> None:
    def one(logits_tokens: int | None) -> list[Tensor]:
        case = MODELS[name]()
        memory = graphpp.Memory(logits_tokens=logits_tokens)
        pipe = graphpp.compile(case.model, case.loss, split=2, microbatches=4, memory=memory)
        losses = step(pipe, case.batch).losses
        return [losses, *(each.grad for each in pipe.parameters() if each.grad is not None)]

    torch.testing.assert_close(one(10), one(None), rtol=1e-5, atol=1e-6)


class Deep(Head):
    """Four stages can be cut: the embedding, the layer, a norm, and the head."""

    def __init__(self) -> None:
        super().__init__(nn.Identity())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.layer(self.embed(tokens)))))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "recompute"), [("1F1B", "full"), ("Interleaved1F1B", None), ("ZBVZeroBubble", None)])
def test_schedules_have_the_same_bits(schedule: str, recompute: Any) -> None:
    (expected,) = run_ranks(cut, 1, "GPipe", None)
    for part in run_ranks(cut, 2, schedule, recompute):
        assert unequal(part, {name: expected[name] for name in part}) == []


def cut(rank: int, schedule: str, recompute: Any) -> Numbers:
    memory = graphpp.Memory(logits_tokens=3, recompute=recompute)
    split = ["layer"] if schedule == "1F1B" else ["layer", "norm", "head"]
    pipe = graphpp.compile(Deep(), flat, split=split, schedule=schedule, microbatches=4, memory=memory)
    tokens, target = batch()
    losses = pipe.step(tokens, target=target).losses
    return {"losses": losses, **{fqn: each.grad for fqn, each in pipe.named_parameters()}}


class Halved(Head):
    """A head whose input is changed in place after it; a frozen head does not keep its input for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.layer(self.embed(tokens)))
        rows = hidden + 0
        logits = self.head(rows)
        rows[:, 1:].mul_(0.5)
        return logits


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "read twice": (Head, lambda logits, target: flat(logits, target) + logits.mean(), "the logits are read by other"),
    "wider": (lambda: Head(Tensor.double), flat, "to.dtype stands between a linear layer and the cross entropy"),
    "narrower": (lambda: Head(Tensor.bfloat16), flat, "to.dtype stands between a linear layer and the cross entropy"),
    "half": (lambda: Head(Tensor.float).to(torch.float16), flat, "the head computes in float16"),
    "capped": (lambda: Head(torch.tanh), flat, "tanh.default stands between a linear layer and the cross entropy"),
    "class weights": (Head, lambda logits, target: flat(logits, target, weight=torch.ones(WORDS)), "has class weights"),
    "a loss for each token": (Head, lambda logits, target: flat(logits, target, reduction="none").mean(), 'reduction="none"'),
    "words before tokens": (Head, lambda logits, target: F.cross_entropy(logits.mT, target), "have 2 dimensions"),
    "input changed in place": (Halved, flat, "changed in place after the head has read it"),
    "no cross entropy": (Head, lambda logits, target: logits.square().mean(), "none is called"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_losses_are_refused_with_their_line(name: str) -> None:
    make, loss, reason = REFUSED[name]
    with pytest.raises(CaptureError, match=r"memory.logits_tokens: no cross entropy of this model") as caught:
        trained(make(), loss, 3)
    assert reason in str(caught.value)
    # torch.export keeps the lines of modules
    in_model = name in ("read twice", "capped", "wider", "narrower", "half", "input changed in place")
    assert in_model == ("test_chunk_logits.py:" in str(caught.value))


def test_the_log_names_a_loss_that_still_has_all_logits(caplog: pytest.LogCaptureFixture) -> None:
    class Two(Head):
        def forward(self, tokens: Tensor) -> Any:
            hidden = torch.tanh(self.layer(self.embed(tokens)))
            return self.head(hidden), self.head(hidden * 2)

    def loss(logits: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return flat(logits[0], target) + flat(logits[1], target) + logits[1].logsumexp(-1).mean()

    trained(Two(), loss, 3)
    assert "still has all logits: at " in caplog.text and "the logits are read by other operations" in caplog.text


def test_the_plan_has_fewer_bytes() -> None:
    """1,024 words, of width 8: logits of 4 x 64 tokens take far more than all else."""

    def peak(logits_tokens: int | None) -> int:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Linear(8, 1024, bias=False))
        example = graphpp.Microbatch((torch.zeros(4, 64, dtype=torch.int64),), {}, torch.zeros(4, 64, dtype=torch.int64))
        memory = graphpp.Memory(logits_tokens=logits_tokens, optimizer="sgd")
        pipe = graphpp.compile(model, flat, example=example, split=["2"], microbatches=1, memory=memory)
        assert pipe.plan.memory is not None
        return pipe.plan.memory.ranks[0].peak

    assert peak(8) < peak(None) / 8
