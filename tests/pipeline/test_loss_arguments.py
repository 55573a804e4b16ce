"""Losses without a target, accumulation over steps, weights by rows, and short last batches, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import graphpp
from graphpp.batch.loss_weights import NO_WEIGHTS, LossWeighting
from tests.distributed import run_ranks
from tests.exhaustive import further

X = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randn(10, 8, generator=torch.Generator().manual_seed(1))


class Output(SimpleNamespace):
    """An output with its own loss, as of Hugging Face models."""


torch.utils._pytree.register_pytree_node(
    Output,
    lambda output: (list(vars(output).values()), list(vars(output))),
    lambda values, names: Output(**dict(zip(names, values, strict=True))),
)


class WithLoss(nn.Module):
    """Returns an `Output` with a loss if it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Output:
        y = self.second(torch.tanh(self.first(x)))
        return Output(logits=y) if labels is None else Output(loss=F.mse_loss(y, labels), logits=y)


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def with_loss() -> WithLoss:
    torch.manual_seed(0)
    return WithLoss()


def with_default(output: Tensor, target: Tensor | None = None) -> Tensor:
    return output.square().mean() if target is None else F.mse_loss(output, target)


class Criterion(nn.Module):
    """A loss module of one argument."""

    def forward(self, output: Tensor) -> Tensor:
        return output.square().mean()


def assert_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (fqn, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), fqn


@pytest.mark.parametrize(
    ("loss", "evaluates"),
    [
        (lambda output: output.square().mean(), True),
        (lambda output, _: output.square().mean(), False),
        (lambda output, target=None: output.square().mean(), True),
        (with_default, True),
        (Criterion(), True),
    ],
    ids=["one argument", "an argument that is not read", "a default", "a default that is read", "a module"],
)
def test_a_loss_that_needs_no_target(loss: Callable[..., Tensor], evaluates: bool) -> None:
    model, twin = layers(), layers()
    pipe = graphpp.compile(model, loss, split=["2"], microbatches=2, example=graphpp.Microbatch((X[:5],)))
    found = pipe.step(X)
    wanted = [twin(part).square().mean() for part in X.split(5)]
    for each in wanted:
        (each / 2).backward()
    assert torch.equal(found.losses, torch.stack(wanted).detach())
    assert_gradients(model, twin)
    evaluated = pipe.eval(X)
    assert (evaluated.loss is not None) == evaluates
    assert evaluated.loss is None or torch.equal(evaluated.loss, torch.stack(wanted).mean())
    assert torch.equal(evaluated.output, torch.cat([twin(part) for part in X.split(5)]))


def needs(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target.float())


@pytest.mark.parametrize("loss", [needs, F.mse_loss, nn.CrossEntropyLoss()])
def test_a_loss_that_needs_its_target(loss: Any) -> None:
    with pytest.raises(graphpp.BatchError, match="the loss needs a target: step") as caught:
        graphpp.compile(layers(), loss, microbatches=2).step(X)
    if loss is needs:
        assert "has no attribute 'float'" in str(caught.value) and "test_loss_arguments.py" in str(caught.value)


@pytest.mark.parametrize("call", ["step", "eval"])
def test_a_target_that_nothing_reads(call: str) -> None:
    with pytest.raises(graphpp.BatchError, match="the loss takes no second positional argument and nothing reads the target"):
        getattr(graphpp.compile(layers(), Criterion(), microbatches=2), call)(X, target=Y)


def evaluates_own_loss(rank: int) -> list[float | None]:
    torch.set_num_threads(1)
    pipe = graphpp.compile(with_loss(), split=["second"], schedule="GPipe", microbatches=2)
    losses = [pipe.eval(X, labels=Y).loss, pipe.eval(X, labels=Y, loss_weight=[0.25, 0.5]).loss, pipe.eval(X).loss]
    return [None if loss is None else float(loss) for loss in losses]


def test_an_evaluation_gives_the_output_s_own_loss_on_every_rank() -> None:
    model = with_loss()
    first, second = (model(x, y).loss.item() for x, y in zip(X.split(5), Y.split(5), strict=True))
    wanted = [pytest.approx((first + second) / 2, rel=1e-6), pytest.approx(first / 4 + second / 2, rel=1e-6), None]
    assert run_ranks(evaluates_own_loss, 2) == [wanted] * 2


@pytest.mark.parametrize("steps", [2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "rows"])
def test_accumulation_over_steps(steps: int, reduction: str) -> None:
    model, twin = layers(), layers()
    pipe = graphpp.compile(model, F.mse_loss, split=["2"], microbatches=2, gradients=reduction)
    for _ in range(steps):
        found = pipe.step(X, target=Y, accumulation_steps=steps)
        losses = [F.mse_loss(twin(x), y) for x, y in zip(X.split(5), Y.split(5), strict=True)]
        for loss in losses:
            ((loss if reduction == "sum" else loss / 2) / steps).backward()
        total = torch.stack(losses)
        assert torch.equal(found.loss, total.sum() if reduction == "sum" else total.mean())
    assert_gradients(model, twin)


def test_seeds_follow_the_arguments_of_each_step() -> None:
    first, second = {"loss_weight": [0.25, 0.5]}, {"loss_weight": [0.5, 0.25]}
    kinds: list[dict[str, Any]] = [{}, first, {"accumulation_steps": 3}, second, first, {}]
    model = layers()
    pipe = graphpp.compile(model, F.mse_loss, split=["2"], microbatches=2)
    for kind in kinds:
        twin = layers()
        weights = kind.get("loss_weight", [0.5, 0.5])
        for x, y, weight in zip(X.split(5), Y.split(5), weights, strict=True):
            (F.mse_loss(twin(x), y) * weight / kind.get("accumulation_steps", 1)).backward()
        pipe.step(X, target=Y, **kind)
        assert_gradients(model, twin)
        pipe.zero_grad()


def test_rows_are_those_of_the_batch_where_most_arguments_are_whole() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, *shifts: Tensor) -> Tensor:
            return self.layer(x) + sum(shift.sum() for shift in shifts)

    model, shifts = Shifted(), [graphpp.whole(torch.ones(7)) for _ in range(3)]
    pipe = graphpp.compile(model, F.mse_loss, microbatches=4, gradients="rows")
    whole = F.mse_loss(model(X, *(shift.value for shift in shifts)), Y)
    assert torch.allclose(pipe.step(X, *shifts, target=Y).loss, whole, rtol=1e-6)
    found = pipe.eval(X, *shifts, target=Y)
    assert torch.allclose(found.loss, whole, rtol=1e-6) and found.output.shape == (10, 8)


TOKENS = torch.randint(0, 20, (8, 5), generator=torch.Generator().manual_seed(0))
LABELS = TOKENS.roll(1, 1).masked_fill(torch.tensor([0, 0, 1, 1, 0, 0, 0, 0], dtype=torch.bool)[:, None], -100)


def tagger() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 20))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Finite gradients for a microbatch without a valid token, whose loss is nan."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """As `cross_entropy`, with gradients that are nan as well."""
    valid = (labels >= 0).float()
    each = F.cross_entropy(logits.flatten(0, 1), labels.flatten().clamp_min(0), reduction="none").view_as(labels)
    return (each * valid).sum() / valid.sum()


FUSED = graphpp.Gradients(fused=True)


@pytest.mark.parametrize("options", [{}, {"gradients": FUSED}, *further({"schedule": "GPipe", "gradients": FUSED})])
@pytest.mark.parametrize("loss", [cross_entropy, masked_mean])
def test_a_microbatch_of_weight_0_counts_as_0(loss: Callable[..., Tensor], options: dict[str, Any]) -> None:
    model, twin = tagger(), tagger()
    pipe = graphpp.compile(model, loss, split=["1"], microbatches=4, **options)
    valid = torch.stack([(part != -100).sum() for part in LABELS.chunk(4)])
    for kind in ({}, {"scaler": torch.amp.GradScaler("cpu", init_scale=1.0)}):
        pipe.zero_grad()
        twin.zero_grad()
        found, whole = pipe.step(TOKENS, target=LABELS, loss_weight=valid / valid.sum(), **kind), loss(twin(TOKENS), LABELS)
        whole.backward()
        assert found.losses.isnan().tolist() == [False, True, False, False]
        torch.testing.assert_close(found.loss, whole.detach())
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(pipe.eval(TOKENS, target=LABELS, loss_weight=valid / valid.sum()).loss, whole.detach())
    pipe.zero_grad()
    assert float(pipe.step(TOKENS, target=LABELS, loss_weight=0).loss) == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def of_shards(rank: int) -> list[Tensor]:
    """The sums of gradients over two shards, of which the first one has a microbatch of weight 0, layer by layer or whole."""
    torch.set_num_threads(1)
    found = []
    for keep in (None, 0):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_shard"))
        pipe = graphpp.compile(tagger(), masked_mean, microbatches=4, mesh=mesh, parallel=graphpp.Parallel(keep=keep))
        weights = [1 / 3, 0, 1 / 3, 1 / 3] if rank == 0 else [0.25] * 4
        pipe.step(TOKENS, target=LABELS if rank == 0 else LABELS.clamp_min(0), loss_weight=weights)
        found.append(torch.cat([parameter.grad.full_tensor().flatten() for parameter in pipe.parameters()]))
    return found


def test_shards_sum_nothing_of_a_microbatch_of_weight_0() -> None:
    twin = tagger()
    ((masked_mean(twin(TOKENS), LABELS) + masked_mean(twin(TOKENS), LABELS.clamp_min(0))) / 2).backward()
    wanted = torch.cat([parameter.grad.flatten() for parameter in twin.parameters()])
    for found in run_ranks(of_shards, 2)[0]:
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *further(torch.float16, torch.float64)])
def test_losses_and_metrics_are_summed_and_reported_in_float32(dtype: torch.dtype) -> None:
    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        value = F.mse_loss(output, target)
        return value, {"double": 2 * value.detach(), "rows": torch.tensor(len(target))}

    model, wide = layers().to(dtype), torch.float64 if dtype == torch.float64 else torch.float32
    x, y = (torch.randn(64, 8, generator=torch.Generator().manual_seed(seed)).to(dtype) * 40 for seed in (0, 1))
    pipe = graphpp.compile(model, loss, microbatches=64)
    found, pairs = pipe.step(x, target=y), zip(x.split(1), y.split(1), strict=True)
    each = torch.stack([loss(model(one), other)[0] for one, other in pairs]).detach()
    assert found.loss.dtype == found.metrics["double"].dtype == wide
    assert torch.equal(found.losses, each) and torch.equal(found.loss, each.to(wide).mean())
    assert torch.equal(found.metrics["double"], (2 * each).to(wide).mean()) and found.metrics["rows"] == 1
    weights = [1 / 64] * 64
    assert torch.equal(pipe.eval(x, target=y, loss_weight=weights).loss, (each.to(wide) * (1 / 64)).sum())


def test_weights_by_rows_need_rows() -> None:
    with pytest.raises(graphpp.BatchError, match="microbatch 1 has no tensor with a batch dimension: give loss_weight="):
        LossWeighting.of("rows", NO_WEIGHTS, [3, None])


def last_batches(rank: int, schedule: str, example: bool) -> list[float]:
    torch.set_num_threads(1)
    first = graphpp.Microbatch((X[:2],), target=Y[:2]) if example else None
    pipe = graphpp.compile(layers(), F.mse_loss, split=["2"], schedule=schedule, microbatches=4, example=first)
    return [float(pipe.step(X[:rows], target=Y[:rows]).loss) for rows in (8, 3, 8, 2, 1, 8)]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("example", [False, True], ids=["no example", "example"])
@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
def test_a_batch_of_few_rows_makes_fewer_microbatches(schedule: str, example: bool) -> None:
    """Two rows of `example` have the shapes of one microbatch: they are cut as the batches before."""
    model = layers()
    wanted = [pytest.approx(F.mse_loss(model(X[:rows]), Y[:rows]).item(), rel=1e-6) for rows in (8, 3, 8, 2, 1, 8)]
    assert run_ranks(last_batches, 2, schedule, example) == [wanted] * 2


def test_a_short_batch_is_cut_as_the_batches_before() -> None:
    """A table of as many rows as a microbatch stays whole."""

    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.layer(x) + table.sum(0)

    torch.manual_seed(0)
    model, table = WithTable(), torch.randn(2, 8)
    pipe = graphpp.compile(model, F.mse_loss, microbatches=2, example=graphpp.Microbatch((X[:2], table), target=Y[:2]))
    with pytest.raises(graphpp.BatchError, match="nothing could be cut"):
        pipe.step(X[:2], table, target=Y[:2])
    assert "cut along" not in repr(pipe)
    for rows in (4, 2):
        found = float(pipe.step(X[:rows], table, target=Y[:rows]).loss)
        assert found == pytest.approx(F.mse_loss(model(X[:rows], table), Y[:rows]).item(), rel=1e-6)
    assert repr(pipe).endswith("cut along dimension 0: args[0], target; whole: args[1]")
