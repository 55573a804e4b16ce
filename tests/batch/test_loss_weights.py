"""Weights per microbatch, numbers that a loss reports, loss scaling, and gradient sums in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn import functional as F

import graphpp
from graphpp import CaptureError
from tests.distributed import run_ranks
from tests.internals import captures

WIDTH, CLASSES, IGNORED = 8, 5, -100


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(dtype)


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """A batch whose first microbatches have most of the labels."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, WIDTH, generator=generator).to(dtype)
    target = torch.randint(0, CLASSES, (12,), generator=generator)
    target[[4, 7, 8, 9, 11]] = IGNORED
    return x, target


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def reporting(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    right = output.argmax(-1) == target
    value = loss(output, target)
    numbers = {"accuracy": right.float().mean(), "right": right.sum(), "any": right.any(), "rows": len(target)}
    return value, {**numbers, "loss": value, "scale": 0.5, "largest": output.abs().max()}


def reported(rank: int, schedule: str) -> dict[str, Tensor]:
    x, target = batch()
    split = ["2"] if schedule == "1F1B" else ["1", "2", "3"]
    pipe = graphpp.compile(net(), reporting, split=split, schedule=schedule, microbatches=4)
    result = pipe.step(x, target=target.clamp_min(0))
    evaluated = pipe.eval(x, target=target.clamp_min(0))
    assert {name: float(value) for name, value in evaluated.metrics.items()} == {
        name: float(value) for name, value in result.metrics.items()
    }
    return dict(result.metrics)


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_reported_numbers_are_averaged_and_on_every_rank(schedule: str) -> None:
    model, (x, target) = net(), batch()
    parts = zip(x.split(3), target.clamp_min(0).split(3), strict=True)
    each = [reporting(model(x), y)[1] for x, y in parts]
    expected = {name: torch.stack([torch.as_tensor(one[name]).float() for one in each]).mean() for name in each[0]}
    for found in run_ranks(reported, 2, schedule):
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_metrics_are_weighed_as_the_losses_are_by_rows() -> None:
    """Ten rows in four microbatches; `prepare` captures both sizes, and the step captures none."""
    x, target = (each[:10] for each in batch())
    model, y = net(), target.clamp_min(0)
    pipe = graphpp.compile(net(), reporting, split=["2"], microbatches=4, gradients="rows")
    with captures() as made:
        pipe.prepare(x, target=y)
        assert len(list(pipe.parameters())) == 8 and pipe.steps == 0 and len(made) == 2
        result, evaluated = pipe.step(x, target=y), pipe.eval(x, target=y)
    value, numbers = reporting(model(x), y)
    for found in (result.metrics, evaluated.metrics):
        torch.testing.assert_close(found["accuracy"], numbers["accuracy"])
        torch.testing.assert_close(found["loss"], value.detach())
    torch.testing.assert_close(result.loss, value.detach())


@pytest.mark.parametrize(
    ("value", "words"),
    [("text", "'what' among the numbers .* is no number, but str"), (torch.ones(2), r"but shape \[2\]: reduce it")],
)
def test_what_is_no_number_is_refused(value: Any, words: str) -> None:
    x, target = batch()
    pipe = graphpp.compile(net(), lambda output, y: (loss(output, y), {"what": value}))
    with pytest.raises(CaptureError, match=words):
        pipe.step(x, target=target)


def token_weights(microbatches: int) -> list[float]:
    valid = [int((part != IGNORED).sum()) for part in batch()[1].chunk(microbatches)]
    return [count / sum(valid) for count in valid]


def weighted(rank: int, weight: Any) -> tuple[dict[str, Tensor | None], Tensor, Tensor]:
    x, target = batch()
    pipe = graphpp.compile(net(), loss, split=2, schedule="1F1B", microbatches=3)
    result = pipe.step(x, target=target, loss_weight=weight)
    return {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()}, result.loss, result.losses


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_token_weights_give_the_gradient_of_the_whole_batch(kind: Any) -> None:
    model, (x, target), weights = net(), batch(), token_weights(3)
    assert len(set(weights)) > 1
    loss(model(x), target).backward()
    loop = net()
    for part, labels, weight in zip(x.chunk(3), target.chunk(3), torch.tensor(weights).tolist(), strict=True):
        (loss(loop(part), labels) * weight).backward()
    for grads, total, losses in run_ranks(weighted, 2, kind(weights)):
        torch.testing.assert_close(total, loss(model(x), target).detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(losses[0], loss(model(x[:4]), target[:4]).detach(), rtol=1e-6, atol=0)
        for fqn, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(fqn).grad, rtol=1e-5, atol=1e-7)
            assert torch.equal(grad, loop.get_parameter(fqn).grad) or kind is list


def test_a_weight_of_zero_leaves_a_microbatch_out() -> None:
    x, target = batch()
    model, reference = net(), net()
    result = graphpp.compile(model, loss, microbatches=2).step(x, target=target, loss_weight=[1.0, 0.0])
    loss(reference(x[:6]), target[:6]).backward()
    assert torch.equal(result.loss, result.losses[0])
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def training(rank: int, kind: str) -> tuple[dict[str, Tensor], list[float]]:
    """Four steps, the first without a scaler; in the second step with the scaler, only rank 0 has an overflow."""
    model = net()
    pipe = graphpp.compile(model, loss, split=2, schedule="1F1B", microbatches=3)
    x, target = batch()
    pipe.step(x, target=target)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = scaler_of(kind)
    scales = []
    for index in range(4):
        optimizer.zero_grad()
        if index == 1 and rank == 0:
            model[0][0].weight.grad = torch.full((WIDTH, WIDTH), float("inf"))  # on this rank only
        pipe.step(x, target=target, scaler=scaler)
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return {fqn: parameter.detach() for fqn, parameter in pipe.named_parameters()}, scales


def scaler_of(kind: str) -> torch.amp.GradScaler:
    if kind == "sharded":
        return ShardedGradScaler("cpu", init_scale=1024.0)
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("kind", ["stock", "sharded"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(kind: str) -> None:
    model, scaler, (x, target) = net(), scaler_of("stock"), batch()
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.1), []
    for index in range(4):
        optimizer.zero_grad()
        if index == 1:
            model[0][0].weight.grad = torch.full((WIDTH, WIDTH), float("inf"))
        for part, labels in zip(x.chunk(3), target.chunk(3), strict=True):
            scaler.scale(loss(model(part), labels) / 3).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    for parameters, found in run_ranks(training, 2, kind):
        assert found == scales
        for fqn, value in parameters.items():
            assert torch.equal(value, model.get_parameter(fqn)), fqn


def test_losses_are_reported_unscaled_and_gradients_scaled() -> None:
    x, target = batch()
    plain, scaled = net(), net()
    one = graphpp.compile(plain, loss, microbatches=2).step(x, target=target)
    two = graphpp.compile(scaled, loss, microbatches=2).step(x, target=target, scaler=scaler_of("stock"))
    assert torch.equal(one.losses, two.losses)
    for mine, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad * 1024)


def low_precision(rank: int, sums: torch.dtype | None) -> dict[str, Tensor]:
    model = net(torch.bfloat16)
    x, target = batch(torch.bfloat16)
    pipe = graphpp.compile(model, loss, split=["2"], schedule="1F1B", microbatches=12, gradients=graphpp.Gradients(dtype=sums))
    pipe.step(x, target=target.clamp_min(0))
    pipe.step(x, target=target.clamp_min(0))
    return {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()}


def test_gradients_of_bfloat16_parameters_add_up_in_float32() -> None:
    model = net(torch.bfloat16)
    x, target = batch(torch.bfloat16)
    before = {fqn: torch.zeros_like(parameter) for fqn, parameter in model.named_parameters()}
    for _ in range(2):
        sums = {fqn: grad.float() for fqn, grad in before.items()}
        for part, labels in zip(x.split(1), target.clamp_min(0).split(1), strict=True):
            model.zero_grad()
            (loss(model(part), labels) / 12).backward()
            for fqn, parameter in model.named_parameters():
                sums[fqn] += parameter.grad.float()
        before = {fqn: total.bfloat16() for fqn, total in sums.items()}
    plain = [grad for part in run_ranks(low_precision, 2, None) for grad in part.items()]
    assert any(not torch.equal(grad, before[fqn]) for fqn, grad in plain), "the test cannot fail"
    for part in run_ranks(low_precision, 2, torch.float32):
        for fqn, grad in part.items():
            assert grad.dtype is torch.bfloat16 and torch.equal(grad, before[fqn]), fqn


def test_a_parameter_that_asks_for_float32_gradients_gets_them() -> None:
    model = net(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    x, target = batch(torch.bfloat16)
    graphpp.compile(model, loss, split=2, microbatches=4).step(x, target=target.clamp_min(0))
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
