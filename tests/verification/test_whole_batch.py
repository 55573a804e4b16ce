"""`graphpp.verify(against="whole batch")` finds models and losses that do not separate over microbatches, and no rounding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp

HERE = __file__
DATA = torch.Generator().manual_seed(0)
X, Y = torch.randn(24, 8, generator=DATA), torch.randint(4, (24,), generator=DATA)


def line_of(text: str) -> int:
    """The number of this file's first line that holds `text`."""
    with open(HERE) as source:
        return next(number for number, line in enumerate(source, 1) if text in line)


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), *middle, nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def sum_of_losses(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="sum")


def verified(model: nn.Module, loss: Any = F.cross_entropy, rows: int = 24, **options: Any) -> graphpp.Verification:
    batch = graphpp.Microbatch((X[:rows],), target=Y[:rows])
    return graphpp.verify(model, loss, **{"example": batch, "microbatches": 4, "against": "whole batch", **options})


def against(found: graphpp.Verification) -> graphpp.Comparison:
    """The comparison with the whole batch, of a pipeline that is right."""
    assert found.cut.verdict == found.eager.verdict == "equal", found
    assert found.whole_batch is not None
    return found.whole_batch


def differing(found: graphpp.Comparison) -> set[str]:
    return {name for name, each in found.all() if each.verdict == "differs"}


@pytest.mark.parametrize(
    ("loss", "gradients", "rows"),
    [
        (F.cross_entropy, "mean", 24),
        (F.cross_entropy, "rows", 24),
        (F.cross_entropy, "rows", 21),
        (sum_of_losses, "sum", 24),
        (sum_of_losses, "sum", 21),
    ],
)
def test_a_loss_that_separates_is_that_of_the_whole_batch(loss: Any, gradients: Any, rows: int) -> None:
    found = verified(mlp(), loss, rows, gradients=gradients)
    compared = against(found)
    assert found.ok and compared.ok and compared.first is None, found
    assert len(compared.losses) == 1 and len(compared.largest) == 6
    assert max(each.relative for _, each in compared.all()) < 5e-7
    assert ("Microbatch 0 ran in the place of microbatch 3" in found.cut.note) == (rows == 21)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.GroupNorm(4, 16), nn.BatchNorm1d(16).eval(), nn.Dropout(0.0)])
def test_layers_that_compute_each_row_alone(norm: nn.Module) -> None:
    assert verified(mlp(norm)).ok


def test_keyword_arguments_targets_in_a_dict_and_arguments_without_rows() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()
            self.layers[0].requires_grad_(False)

        def forward(self, x: Tensor, *, mask: Tensor, table: Tensor, power: int) -> Tensor:
            return self.layers(x * mask + table.mean(0)) ** power

    def loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
        return (F.cross_entropy(output, target["classes"], reduction="none") * target["weights"]).mean()

    kwargs = {"mask": torch.rand(24, 8), "table": graphpp.whole(torch.randn(24, 8)), "power": 2}
    batch = graphpp.Microbatch((X,), kwargs, {"classes": Y, "weights": torch.rand(24)})
    found = verified(Named(), loss, example=batch)
    assert found.ok and set(against(found).largest) == {f"layers.{at}.{kind}" for at in (2, 4) for kind in ("weight", "bias")}


def test_a_model_that_returns_its_loss() -> None:
    class Own(nn.Module):
        def __init__(self, norm: nn.Module) -> None:
            super().__init__()
            self.layers = mlp(norm)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": F.cross_entropy(self.layers(x), labels)}

    batch = graphpp.Microbatch((X,), {"labels": Y})
    assert verified(Own(nn.Identity()), None, example=batch).ok
    compared = against(verified(Own(nn.BatchNorm1d(16)), None, example=batch))
    assert compared.first is not None and compared.first.fqn == "layers.1"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_sums_over_many_rows_are_rounded_in_other_orders(dtype: torch.dtype) -> None:
    x, y = torch.randn(4096, 64, dtype=dtype), torch.randint(10, (4096,))
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).to(dtype)
    assert verified(model, example=graphpp.Microbatch((x,), target=y)).ok


def test_batch_norm_is_named() -> None:
    found = verified(mlp(nn.BatchNorm1d(16)))
    compared, said = against(found), str(found)
    assert not found.ok and compared.verdict == "differs"
    assert {"loss", "gradient of 0.weight", "buffer 1.running_mean", "buffer 1.num_batches_tracked"} <= differing(compared)
    assert compared.first is not None and (compared.first.fqn, compared.first.microbatch) == ("1", 0)
    assert compared.first.what == "the rows that BatchNorm1d returns"
    assert "does not separate" in compared.note and "group norm" in compared.note and "microbatches=1" in compared.note
    assert "gradient of 0.weight: differs" in said and "NOT THE WHOLE BATCH" in said and "WRONG" not in said
    sizes = [each.relative for each in compared.largest.values()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 1e-2
    with pytest.raises(graphpp.GraphPPError, match="NOT THE WHOLE BATCH"):
        found.raise_if_wrong()


def test_rows_that_a_model_mixes_itself() -> None:
    class Centred(nn.Module):
        def forward(self, x: Tensor) -> Tensor:  # mixes rows
            return x - x.mean(0)

    first = against(verified(mlp(nn.Sequential(nn.Identity(), Centred())))).first
    assert first is not None and (first.fqn, first.source) == ("1.1", f"{HERE}:{line_of('# mixes rows')}")


def test_a_mean_over_tokens_that_are_not_padding() -> None:
    labels = Y.masked_fill(torch.arange(24) > 14, -100)
    compared = against(verified(mlp(), example=graphpp.Microbatch((X,), target=labels), microbatches=2))
    assert not compared.ok and "loss_weight" in compared.note


@pytest.mark.parametrize(
    ("loss", "gradients", "rows", "fits"),
    [
        (F.cross_entropy, "mean", 21, "rows"),
        (F.cross_entropy, "sum", 24, "mean"),
        (sum_of_losses, "mean", 24, "sum"),
        (sum_of_losses, "rows", 21, "sum"),
    ],
)
def test_the_reduction_that_fits_is_named(loss: Any, gradients: Any, rows: int, fits: str) -> None:
    compared = against(verified(mlp(), loss, rows, gradients=gradients))
    assert not compared.ok and f'gradients="{fits}" gives the loss of the whole batch' in compared.note


def test_a_gradient_alone_that_differs() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = F.cross_entropy(output, target)
        return value / value.detach()

    compared = against(verified(mlp(), loss))
    assert not compared.ok and compared.losses[0].verdict != "differs"
    assert compared.first is not None and compared.first.what.startswith("the gradient of")
    assert "gives the loss" not in compared.note


def test_buffers_alone_that_differ() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return x

    compared = against(verified(mlp(Counting())))
    assert differing(compared) == {"buffer 1.calls"} and compared.buffers["1.calls"].largest == 3
    assert compared.first is None and "once per microbatch, 4 times a step" in compared.note


def test_dropout_is_said_not_to_be_compared() -> None:
    found = verified(mlp(nn.Dropout(0.1)))
    compared = against(found)
    assert found.ok and not compared.compared and "random numbers in 1" in compared.note
    assert "NOT COMPARED" in str(found) and "ok as far as it was compared" in str(found)


def test_what_a_step_is_compared_with() -> None:
    with pytest.raises(graphpp.GraphPPError, match="against: take 'microbatches' or 'whole batch', got 'eager'"):
        verified(mlp(), against="eager")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"against": "batch"}, "against: take 'microbatches' or 'whole batch', got 'batch'"),
        ({"against": X}, r"against: take 'microbatches' or 'whole batch', got a tensor \[24, 8\] of torch.float32"),
        ({"example": [graphpp.Microbatch((X,), target=Y)] * 2}, "example= the whole batch"),
        ({"microbatches": None, "ranks": 1}, "give microbatches="),
        ({"example": graphpp.Microbatch((X[:0],), target=Y[:0])}, "empty"),
    ],
)
def test_arguments_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(graphpp.GraphPPError, match=words):
        verified(mlp(), **options)
