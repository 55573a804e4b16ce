"""Shapes that vary: an uneven last microbatch, microbatches of several shapes, other shapes at other steps.

Each shape is captured once; the numbers are those of an eager loop over the same microbatches.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import BatchError, Microbatch
from graphpp.batch.cut_batch import microbatch_sizes
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.training import capturing

pytestmark = pytest.mark.usefixtures("shared_captures")
VOCABULARY, WIDTH = 11, 8


class Tagger(nn.Module):
    """Embedding, attention over the sequence, a norm that keeps statistics, a tied head; any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: Tensor, deep: bool = False) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.layer(self.norm(x.flatten(0, 1)).view_as(x)).tanh()
        return (self.extra(x) if deep else x) @ self.embedding.weight.t()


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(rows: int, length: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed + 100 * length))


def microbatch(rows: int, length: int) -> Microbatch:
    return Microbatch((tokens(rows, length),), {}, tokens(rows, length, seed=1))


def eager(parts: Sequence[Microbatch], steps: int = 1) -> tuple[list[Tensor], nn.Module]:
    """The losses of the last step, and the model after the steps."""
    model = Tagger()
    for _ in range(steps):
        losses = []
        for part in parts:
            value = loss(model(*part.args), part.target)
            (value / len(parts)).backward()
            losses.append(value.detach())
    return losses, model


def assert_like_eager(model: nn.Module, reference: nn.Module, names: Sequence[str] | None = None) -> None:
    """Gradients and buffers bit-equal; the tied embedding's within 1e-6."""
    for fqn, parameter in reference.named_parameters():
        mine = model.get_parameter(fqn).grad
        if names is not None and fqn not in names:
            continue
        if parameter.grad is None:
            assert mine is None, fqn
        elif fqn == "embedding.weight":
            assert (mine - parameter.grad).norm() <= 1e-6 * parameter.grad.norm()
        else:
            assert torch.equal(mine, parameter.grad), fqn
    for fqn, buffer in reference.named_buffers():
        assert (names is not None and fqn not in names) or torch.equal(model.get_buffer(fqn), buffer), fqn


@pytest.mark.parametrize(
    ("size", "count", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 3, 1]), (9, 4, [3, 2, 2, 2]), (7, 3, [3, 3, 1]), (5, 5, [1] * 5), (5, 1, [5])],
)
def test_sizes_of_microbatches(size: int, count: int, sizes: list[int]) -> None:
    assert microbatch_sizes(size, count) == sizes


SPLITS = {"1F1B": ["layer"], "Interleaved1F1B": ["attention", "norm", "layer"], "LoopedBFS": ["attention", "norm", "layer"]}


def on_rank(rank: int, what: str, schedule: str) -> tuple[dict[str, Any], Tensor]:
    """A pipeline's gradients and buffers on this rank, and the losses."""
    model = Tagger()
    pipe = graphpp.compile(model, loss, split=SPLITS[schedule], schedule=schedule, microbatches=4)
    with capturing("test_shapes"):
        if what == "uneven":
            result = pipe.step(tokens(10), target=tokens(10, seed=1))
        else:
            for part in several():
                result = pipe.step_microbatches(part)
    local = {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()} | dict(pipe.named_buffers())
    return local, result.losses


def several() -> list[list[Microbatch]]:
    """Two steps; in each the microbatches have other lengths, and the second uses shapes of the first again."""
    first = [microbatch(2, 5), microbatch(2, 3), microbatch(1, 7), microbatch(2, 3)]
    return [first, [microbatch(2, 3), microbatch(2, 9), microbatch(2, 5), microbatch(2, 3)]]


@pytest.mark.parametrize(
    ("what", "schedule"),
    [
        ("uneven", "1F1B"),
        *further(("several", "Interleaved1F1B"), ("uneven", "LoopedBFS"), ("several", "1F1B")),
        *further(("several", "LoopedBFS"), ("uneven", "Interleaved1F1B")),
    ],
)
def test_two_ranks_run_microbatches_of_different_shapes(what: str, schedule: str) -> None:
    if what == "uneven":
        sizes = [3, 3, 3, 1]
        whole = zip(tokens(10).split(sizes), tokens(10, seed=1).split(sizes), strict=True)
        losses, reference = eager([Microbatch((x,), {}, y) for x, y in whole])
    else:
        reference = Tagger()
        for parts in several():
            losses = []
            for part in parts:
                value = loss(reference(*part.args), part.target)
                (value / 4).backward()
                losses.append(value.detach())
    for local, found in run_ranks(on_rank, 2, what, schedule):
        assert torch.equal(found, torch.stack(losses))
        model = Tagger()
        for fqn, value in local.items():
            if fqn in dict(model.named_buffers()):
                model.get_buffer(fqn).copy_(value)
            else:
                model.get_parameter(fqn).grad = value
        assert_like_eager(model, reference, list(local))


def test_each_shape_is_captured_once() -> None:
    captured: list[Any] = []

    def noted(*args: Any, **options: Any) -> Any:
        captured.append(args[2])
        return internals.capture(*args, **options)

    model = Tagger()
    pipe = graphpp.compile(model, loss, split=["layer"], microbatches=2, debug=graphpp.Debug(dynamic=False))
    with internals.capturing_by(noted):
        for rows, length in [(4, 5), (4, 3), (4, 5), (3, 3), (4, 3), (3, 3)]:
            pipe.step(tokens(rows, length), target=tokens(rows, length, seed=1))
    assert [tuple(example.args[0].shape) for example in captured] == [(2, 5), (2, 3), (1, 3)]


def test_microbatches_that_train_other_parameters_are_refused() -> None:
    pipe = graphpp.compile(Tagger(), loss, split=["layer"])
    one = microbatch(2, 5)
    with pytest.raises(BatchError, match=r"microbatch 1 has a shape or structure for which .* other gradients"):
        pipe.step_microbatches([one, Microbatch(one.args, {"deep": True}, one.target)])


class Counter(nn.Module):
    """Counts what is long, and multiplies by the count."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            self.count.add_(1.0)
        return self.line(x) * self.count


def test_a_buffer_that_only_some_microbatches_of_a_step_write_is_refused() -> None:
    parts = [Microbatch((torch.randn(rows, 4),), {}, torch.zeros(rows, 4)) for rows in (3, 2, 3, 2)]
    pipe = graphpp.compile(Counter(), nn.functional.mse_loss)
    with pytest.raises(BatchError, match=r"microbatch 1 has a shape or structure for which .* other new values of buffers"):
        pipe.step_microbatches(parts)


def test_no_more_graphs_are_kept_than_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model = Tagger()
    pipe = graphpp.compile(model, loss, microbatches=1, debug=graphpp.Debug(max_graphs=2, dynamic=False))
    with caplog.at_level(logging.WARNING, logger="graphpp"):
        for length in (3, 4):
            pipe.step(tokens(2, length), target=tokens(2, length, seed=1))
        assert all("no gradient reaches" in each.getMessage() for each in caplog.records)  # a layer that few sizes read
        caplog.clear()
        pipe.step(tokens(2, 5), target=tokens(2, 5, seed=1))
    assert len(caplog.records) == 1
    assert "args[0]: [2, 5]" in caplog.text and "after args[0]: [2, 4]" in caplog.text
    assert internals.kept(pipe) == (2, 2)
    pipe.step(tokens(2, 3), target=tokens(2, 3, seed=1))
    _, reference = eager([microbatch(2, length) for length in (3,)])
    for parts in (microbatch(2, 4), microbatch(2, 5), microbatch(2, 3)):
        loss(reference(*parts.args), parts.target).backward()
    for fqn, parameter in reference.named_parameters():
        if fqn != "embedding.weight" and parameter.grad is not None:
            assert torch.equal(model.get_parameter(fqn).grad, parameter.grad), fqn


def test_graphs_are_dropped_in_an_order_that_hashes_do_not_decide() -> None:
    """Ranks have other hash seeds, and must drop the same graphs."""
    model = nn.Sequential(nn.Linear(4, 4))
    pipe = graphpp.compile(model, F.mse_loss, microbatches=3, debug=graphpp.Debug(max_graphs=12, dynamic=False))
    for rows in (8, 11, 14, 17, 20, 23):  # pieces of two sizes, the smaller one last
        pipe.step(torch.ones(rows, 4), target=torch.ones(rows, 4))
    for rows in (8, 11, 14, 17, 20, 23):
        pipe.step(torch.ones(rows, 4), target=torch.ones(rows, 4))
        usual = -(-rows // 3)
        sizes = [lines[1].partition(": [")[2].partition(",")[0] for lines in internals.signatures(pipe)[-2:]]
        assert sizes == [str(usual), str(rows - 2 * usual)], rows


def test_outputs_that_cannot_be_joined_are_refused_and_counts_are_not_taken_from_one_part() -> None:
    class Turned(Tagger):
        def forward(self, tokens: Tensor, deep: bool = False) -> Any:
            x = super().forward(tokens, deep)
            return {"x": x.flatten(1).t()} if deep else {"x": x, "rows": len(tokens)}

    pipe = graphpp.compile(Turned(), loss, microbatches=3)
    for kwargs in ({"deep": True}, {}):
        with pytest.raises(BatchError, match=r"no batch dimension in front|makes other outputs"):
            pipe.eval(tokens(7), **kwargs)
    assert pipe.eval(tokens(6)).output["rows"] == 2
