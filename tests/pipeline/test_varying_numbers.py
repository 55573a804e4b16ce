"""Python numbers that change from call to call: one graph takes them as inputs, with the bits and dtypes of eager."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import cases, further

WORDS = 20


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, WORDS)).to(dtype)


def tokens(length: int = 5, rows: int = 8) -> Tensor:
    return torch.randint(0, WORDS, (rows, length), generator=torch.Generator().manual_seed(length))


def divided(logits: Tensor, target: tuple[Tensor, float]) -> Tensor:
    """A sum over tokens by a number that the caller has counted, as Hugging Face's losses with `num_items_in_batch`."""
    labels, count = target
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


Loss = Callable[[Tensor, Any], Tensor]


def assert_like_eager(pipe: graphpp.Pipeline, twin: nn.Module, loss: Loss, x: Tensor, number: Any) -> None:
    twin.zero_grad()
    pipe.zero_grad()
    losses = [loss(twin(part), (part, number)) for part in x.chunk(4)]
    for each in losses:
        (each / 4).backward()
    found, wanted = pipe.step(x, target=(x, number)).losses, torch.stack(losses).detach()
    assert found.dtype == wanted.dtype and torch.equal(found, wanted), number
    theirs = dict(twin.named_parameters())
    for fqn, mine in pipe.named_parameters():
        assert mine.grad is not None and torch.equal(mine.grad, theirs[fqn].grad), (fqn, number)  # type: ignore[arg-type]


NUMBERS: dict[str, list[Any]] = {
    "ints": [7, 8, 9, 1, -3, 2**62],
    "floats": [7.5, 0.1, 1e-30, 3.0, -2.25],
    "NumPy's floats": [numpy.float64(7.5), numpy.float64(0.1), numpy.float64(3)],
}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_is_an_input_from_its_second_value_on(kind: str) -> None:
    twin = model()
    with internals.captures() as made:
        pipe = graphpp.compile(copy.deepcopy(twin), divided, split=["1"], microbatches=4)
        for number in NUMBERS[kind]:
            assert_like_eager(pipe, twin, divided, tokens(), number)
        assert len(made) == 3  # for the first value; for the second one, and for all values
        for number in NUMBERS[kind][:3]:
            evaluated = pipe.eval(tokens(), target=(tokens(), number)).losses
            assert torch.equal(evaluated, torch.stack([divided(twin(part), (part, number)) for part in tokens().chunk(4)]))
    assert len(made) == 6 and internals.kept(pipe) == (4, 4)


def test_sizes_and_numbers_vary_at_once() -> None:
    twin = model()
    with internals.captures() as made:
        pipe = graphpp.compile(copy.deepcopy(twin), divided, split=["1"], microbatches=4)
        for number, length in ((7, 5), (8, 6), (9, 11), (7, 5), (10.5, 5)):  # a float is another kind of number
            assert_like_eager(pipe, twin, divided, tokens(length), number)
    assert len(made) == 4


# What a loss does with a number n: whether one graph does so for all numbers.
USES: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "times": (lambda x, n: x * n, True),
    "under": (lambda x, n: n / (x.abs() + 1), True),
    "of a 0-dim tensor": (lambda x, n: x.mean() * n + x, True),
    "with integers": (lambda x, n: x * (torch.arange(WORDS) / n), True),
    "where": (lambda x, n: torch.where(x > 0, x, n), True),
    "bounds": (lambda x, n: x.clamp(max=n) + x.masked_fill(x < n, n), True),
    "full": (lambda x, n: x * torch.full((WORDS,), n) * torch.full_like(x, n), True),
    "power": (lambda x, n: x.abs() ** n, False),
    "alpha": (lambda x, n: torch.add(x, x, alpha=n), False),
    "a branch": (lambda x, n: x * 2 if n > 2 else x, False),
    "its type": (lambda x, n: x / n if isinstance(n, int | float) else x, False),
    "its text": (lambda x, n: x * len(str(n)), False),
    "a float": (lambda x, n: x * float(n), False),
    "a tensor": (lambda x, n: x * torch.tensor(n), False),
}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("numbers", [(3, 5, 2), *further(((0.3, 0.7, 1.1),))])
@pytest.mark.parametrize("use", cases(USES, "times", "of a 0-dim tensor", "full", "a branch"))
def test_every_use_of_a_number_has_eager_s_bits_and_dtypes(use: str, numbers: tuple[Any, ...]) -> None:
    apply, general = USES[use]

    def loss(logits: Tensor, target: tuple[Tensor, Any]) -> Tensor:
        return apply(logits, target[1]).square().mean()

    for dtype in (torch.float32, torch.bfloat16):
        twin = model(dtype)
        with internals.captures() as made:
            pipe = graphpp.compile(copy.deepcopy(twin), loss, microbatches=4)
            for number in numbers:
                assert_like_eager(pipe, twin, loss, tokens(), number)
        assert (len(made) == 3) == general


def steered(logits: Tensor, target: tuple[Tensor, tuple[float, dict[str, int]]]) -> Tensor:
    """One number divides, the other one steers Python."""
    labels, (count, more) = target
    value = divided(logits, (labels, count))
    return value * 2 if more["epoch"] > 1 else value


def test_a_number_that_steers_stays_a_constant_and_the_log_names_it_once(caplog: pytest.LogCaptureFixture) -> None:
    twin = model()
    with internals.captures() as made, caplog.at_level(logging.WARNING, logger="graphpp"):
        pipe = graphpp.compile(copy.deepcopy(twin), steered, split=["1"], microbatches=4)
        for step in range(6):
            assert_like_eager(pipe, twin, steered, tokens(), (7 + step, {"epoch": step // 2}))
        assert [graph.plain_because for graph in made] == [{}] * len(made)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("each value of target[1][1]['epoch'] is captured by itself, because a trace with a number of any")
    assert "could not guard" in line.lower() and f"at {__file__}:{steered.__code__.co_firstlineno + 4}" in line
    assert internals.kept(pipe)[0] == 4  # the first one, and one of each epoch


def test_numbers_of_each_microbatch() -> None:
    """Already in the first call, and a number of no microbatch is a constant."""
    twin = model()
    pipe = graphpp.compile(copy.deepcopy(twin), divided, split=["1"], microbatches=4)
    parts = [(part, number) for part, number in zip(tokens().chunk(4), (3, 4, 5, 5), strict=True)]
    with internals.captures() as made:
        for _ in range(2):
            found = pipe.step_microbatches([graphpp.Microbatch((part,), {}, (part, number)) for part, number in parts])
    assert len(made) == 2 and torch.equal(found.losses, torch.stack([divided(twin(part), (part, n)) for part, n in parts]))


def checked(logits: Tensor, target: tuple[Tensor, int]) -> tuple[Tensor, dict[str, Any]]:
    torch._check(target[1] > 3)
    return divided(logits, target) if target[1] > 3 else logits.sum() * 0, {"half": target[1] / 2}


def test_what_a_trace_assumes_of_a_number_is_checked() -> None:
    pipe = graphpp.compile(model(), checked, microbatches=4)
    for length in (5, 5, 5, 6, 6):
        for number in (7, 8):
            found = pipe.step(tokens(length), target=(tokens(length), number))
            assert found.loss > 0 and float(found.metrics["half"]) == number / 2
        with pytest.raises(RuntimeError, match=r"the model needs 4 <= u\d, .*: u\d from target\[1\]"):
            pipe.step(tokens(length), target=(tokens(length), 2))


def test_no_number_is_an_input_under_dynamic_false() -> None:
    twin = model()
    with internals.captures() as made:
        pipe = graphpp.compile(copy.deepcopy(twin), divided, microbatches=4, debug=graphpp.Debug(dynamic=False))
        for number in (7, 8, 9, 10):
            assert_like_eager(pipe, twin, divided, tokens(), number)
    assert len(made) == 4


def on_rank(rank: int, schedule: str, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], int, str]:
    torch.set_num_threads(1)
    pipe, losses, error = graphpp.compile(model(), divided, schedule=schedule, microbatches=4, **options), [], ""
    with internals.captures() as made:
        for number, length in ((7, 5), (8, 5), (9, 7), (6, 8)):
            pipe.zero_grad()
            losses.append(pipe.step(tokens(length), target=(tokens(length), number)).losses)
        grads = {fqn: parameter.grad.clone() for fqn, parameter in pipe.named_parameters()}
        try:
            pipe.step(tokens(), target=(tokens(), 9 + rank))
        except graphpp.MismatchError as other:
            error = str(other)
        pipe.step(tokens(), target=(tokens(), 7))
    return losses, grads, len(made), error


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1F1B", {"split": ["2"]}),
        *further(
            ("ZBVZeroBubble", {"split": ["1", "2", "3"], "memory": "full"}),
            ("1F1B", {"split": ["2"], "backend": "inductor"}),
        ),
    ],
)
def test_ranks_take_numbers_alike(schedule: str, options: dict[str, Any]) -> None:
    ranks, twin, tolerance = run_ranks(on_rank, 2, schedule, options), model(), 1e-5 if "backend" in options else 0
    for at, (number, length) in enumerate(((7, 5), (8, 5), (9, 7), (6, 8))):
        twin.zero_grad()
        losses = [divided(twin(part), (part, number)) for part in tokens(length).chunk(4)]
        for each in losses:
            (each / 4).backward()
        for found in ranks:
            torch.testing.assert_close(found[0][at], torch.stack(losses).detach(), rtol=tolerance, atol=0)
    for found in ranks:
        for fqn, grad in found[1].items():
            torch.testing.assert_close(grad, twin.get_parameter(fqn).grad, rtol=tolerance, atol=tolerance)
    assert "differs in the numbers of the microbatches" in ranks[0][3] and ranks[0][3] == ranks[1][3]
    assert [found[2] for found in ranks] == [5, 0]  # the first rank captures for both
