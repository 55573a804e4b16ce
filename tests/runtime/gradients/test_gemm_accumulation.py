"""Gradients that are products are multiplied into their sums: the plain loop's numbers but for rounding, in no new memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import graphpp
from graphpp.runtime.gradients.accumulate import FusedAccumulator, MicrobatchSink
from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel
from graphpp.runtime.runner import GraphPPRunner, RunnerConfig
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import cases, further
from tests.fuzz.harness import shuffled
from tests.models import MODELS, cuts
from tests.special_models import SPECIAL
from tests.training import Counting, capturing_once, trained

D, ROWS, LENGTH, VOCAB = 8, 24, 4, 16
MICROBATCHES = 4
TOLERANCE = 1e-5  # of the largest element of a gradient: sums of some hundred float32, rounded in another order


class Block(nn.Module):
    """A layer for every operation that makes a weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.turned = nn.Parameter(torch.randn(D, D) / D)  # x @ w
        self.experts = nn.Parameter(torch.randn(4, D, D) / D)
        self.heads = nn.Parameter(torch.randn(2, D, D // 2) / D)  # [heads, in, out]
        self.outer = nn.Parameter(torch.randn(D // 2, 2, D) / D)  # [out, heads, in]
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.point = nn.Conv1d(D, D, 1)
        self.scale = nn.Parameter(torch.ones(D))
        self.again = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x)))) * self.scale + x @ self.turned
        x = x + torch.bmm(x.reshape(4, -1, D), self.experts).reshape(x.shape)
        h = torch.einsum("bsd,hde->bhse", x, self.heads)
        x = x + torch.einsum("bhse,ehd->bsd", h, self.outer)
        x = x + self.point(self.conv(x.transpose(1, 2))).transpose(1, 2)
        return self.again(torch.tanh(self.again(x)))


class Net(nn.Module):
    """Parameters that are tied, used twice, frozen, unused."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].up.weight.requires_grad_(False)
        self.unused = nn.Linear(2, 2)
        self.head = nn.Linear(D, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(VOCAB, (2, ROWS, LENGTH), generator=generator)
    return tokens, targets


def gradients(dtype: torch.dtype = torch.float32, steps: int = 1, **options: Any) -> dict[str, Tensor]:
    """The gradients of a step, or the sum of several steps'."""
    model = Net().to(dtype)
    pipe = graphpp.compile(model, loss, **{"microbatches": MICROBATCHES, **options})
    for seed in range(steps):
        tokens, targets = batch(seed)
        pipe.step(tokens, target=targets)
    return {fqn: p.grad for fqn, p in pipe.named_parameters() if p.grad is not None}


def assert_near(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    """Assert that values are near, relative to the largest element."""
    assert found.keys() == expected.keys()
    for fqn, value in expected.items():
        error = (found[fqn].double() - value.double()).abs().max() / value.double().abs().max().clamp(min=1e-6)
        assert error <= tolerance, f"{fqn}: {error}"


SPLITS = {
    "one stage": {"split": 1},
    "tied over two stages": {"split": ["blocks.1"], "schedule": "1F1B"},
    "halves": {"split": ["blocks.1"], "schedule": shuffled(2, MICROBATCHES, 3), "microbatches": None},
    "recomputed": {"split": ["blocks.1"], "schedule": shuffled(2, MICROBATCHES, 1), "microbatches": None, "memory": "full"},
}


@cache
def plain() -> dict[str, Tensor]:
    """The gradients of two steps in the plain loop."""
    model = Net()
    for seed in range(2):
        for tokens, targets in zip(*(part.chunk(MICROBATCHES) for part in batch(seed)), strict=True):
            (loss(model(tokens), targets) / MICROBATCHES).backward()
    return {fqn: p.grad for fqn, p in model.named_parameters() if p.grad is not None}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("how", cases(SPLITS, "halves", "tied over two stages"))
def test_it_is_the_plain_loop_but_for_rounding(how: str) -> None:
    with capturing_once():
        assert_near(gradients(steps=2, gradients=graphpp.Gradients(fused=True), **SPLITS[how]), plain(), TOLERANCE)


def test_without_a_word_eager_programs_stay_bit_equal() -> None:
    with capturing_once():
        silent, fused = gradients(steps=2), gradients(steps=2, gradients=graphpp.Gradients(fused=True))
    assert all(torch.equal(plain()[fqn], silent[fqn]) for fqn in plain())
    assert any(not torch.equal(plain()[fqn], fused[fqn]) for fqn in plain()), "it was not fused"


@pytest.mark.parametrize("name", ["sequential", "norms", *further(*sorted(SPECIAL.keys() - {"norms"}), "hf_gpt2")])
def test_models_train_as_when_every_bit_is_kept(name: str) -> None:
    stages = 4 if name in MODELS else 2
    options = {"split": cuts(name, 4) if name in MODELS else 2, "schedule": shuffled(stages, MICROBATCHES, 5)}
    found, expected = (
        trained(1, name, steps=1, **options, gradients=graphpp.Gradients(fused=fused)) for fused in (True, False)
    )
    assert torch.equal(found.losses[0], expected.losses[0])
    assert_near(*({fqn: g for fqn, g in each.grads[0].items() if g is not None} for each in (found, expected)), 1e-4)


def test_bfloat16_adds_up_in_float32() -> None:
    def run(fused: bool) -> dict[str, Tensor]:
        sums = graphpp.Gradients(fused=fused, dtype=torch.float32)
        return gradients(microbatches=12, dtype=torch.bfloat16, gradients=sums)

    with capturing_once():
        wide, unfused = run(True), run(False)
    assert all(value.dtype == torch.bfloat16 for value in wide.values())
    assert_near(wide, unfused, 2**-8)  # rounded once, at the end


@pytest.mark.exhaustive
def test_autocast_adds_narrow_products_into_wide_sums() -> None:
    def run(fused: bool) -> dict[str, Tensor]:
        with torch.autocast("cpu", torch.bfloat16), capturing_once():
            return gradients(gradients=graphpp.Gradients(fused=fused))

    with Counting() as plain:
        expected = run(False)
    with Counting() as counting:
        found = run(True)
    assert_near(found, expected, 1e-5)  # narrow products, wide sums
    assert counting.calls["aten._to_copy"] < plain.calls["aten._to_copy"]


class Linears(nn.Module):
    """Weights of distinct sizes, no biases: all gradients are products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(31 + i, 32 + i, bias=False) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Made(TorchDispatchMode):
    """Counts the operators that make a tensor of a given shape in new memory."""

    def __init__(self, shapes: set[tuple[int, ...]]) -> None:
        super().__init__()
        self.shapes, self.found = shapes, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {leaf.untyped_storage().data_ptr() for leaf in self._tensors((args, kwargs))}
        for value in self._tensors(result):
            if tuple(value.shape) in self.shapes and value.untyped_storage().data_ptr() not in known:
                self.found.append(str(func))
        return result

    def _tensors(self, value: Any) -> Iterator[Tensor]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            for item in value.values() if isinstance(value, dict) else value:
                yield from self._tensors(item)


@pytest.mark.parametrize("schedule", ["1F1B", shuffled(2, MICROBATCHES, 4)])
def test_no_gradient_is_made_after_the_first_and_none_is_added(schedule: Any) -> None:
    model = Linears()
    options = {"microbatches": MICROBATCHES} if schedule == "1F1B" else {}
    pipe = graphpp.compile(
        model, lambda y, _: y.square().mean(), split=2, schedule=schedule, gradients=graphpp.Gradients(fused=True), **options
    )
    x = torch.randn(ROWS, 31)
    pipe.step(x, target=x)
    model.zero_grad()
    shapes = {tuple(layer.weight.shape) for layer in model.layers}
    with Made(shapes | {shape[::-1] for shape in shapes}) as made, Counting() as counting:
        pipe.step(x, target=x)
    assert len(made.found) == len(shapes), made.found  # each sum is made once
    assert counting.calls["aten.addmm_"] == (MICROBATCHES - 1) * len(shapes)
    assert counting.calls["aten.add_"] == 0
    with Made(shapes | {shape[::-1] for shape in shapes}) as made:
        pipe.step(x, target=x)  # `param.grad` exists, and is the sum
    assert made.found == []


def test_what_is_no_product_is_added_in_place_once() -> None:
    model = Net()
    pipe = graphpp.compile(model, loss, microbatches=MICROBATCHES, gradients=graphpp.Gradients(fused=True), split=1)
    tokens, targets = batch()
    pipe.step(tokens, target=targets)
    with Counting() as counting:
        pipe.step(tokens, target=targets)
    blocks = 2
    # Tensors: the embedding; norm, convolutions, scale, the biases of `up` and, twice, `again`. `heads` too: the columns of
    # its product have no regular distance, so strides cannot describe the product's place.
    assert counting.calls["aten.add_"] == MICROBATCHES * (1 + blocks * (2 + 4 + 1 + 1 + 2 + 1))
    # Products: the head, `up` of the first block; `down`, `turned`, `again` twice, and batches for `experts` and `outer`.
    assert counting.calls["aten.addmm_"] == MICROBATCHES * (2 + blocks * 4)
    assert counting.calls["aten.baddbmm_"] == MICROBATCHES * blocks * 2


def sums_and_sink(initial: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[FusedAccumulator, MicrobatchSink]:
    sums = FusedAccumulator(["w"])
    sums.start({} if initial is None else {"w": initial}, {"w": dtype})
    return sums, MicrobatchSink(sums, 0, {5: "w"})


def test_a_strange_gradient_that_is_there_is_added_to() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 6)
    for there in (torch.randn(6, 4).t(), torch.randn(8, 12)[::2, ::2], torch.randn(30)[3:27].view(4, 6)):
        expected = there + 2 * (a @ b)
        sums, sink = sums_and_sink(there)
        sink.matmul(5, a, b)
        sink.matmul(5, b.t(), a.t(), ((4, 6), (6, 4), (1, 6)))
        torch.testing.assert_close(sums.sums["w"], expected)
        assert sums.sums["w"] is there


def test_another_kernel_multiplies() -> None:
    calls = []

    class Noted(MatmulKernel):
        def multiply_add(self, total: Tensor, a: Tensor, b: Tensor) -> None:
            calls.append(total.shape)
            super().multiply_add(total, a, b)

    model, x = Linears(), torch.randn(ROWS, 31)
    pipe = graphpp.compile(
        model, lambda y, _: y.square().mean(), split=1, microbatches=MICROBATCHES, gradients=graphpp.Gradients(fused=True)
    )
    pipe.step(x, target=x)
    usual = internals.last_runner(pipe)
    runner = GraphPPRunner(usual.programs, usual.schedule, usual.state, usual.place, RunnerConfig(kernel=Noted()))
    parts = [{"args[0]": part} for part in x.chunk(MICROBATCHES)]
    runner.step(parts, [torch.tensor(1 / MICROBATCHES)] * MICROBATCHES)
    assert calls.count(torch.Size((32, 31))) == MICROBATCHES


def on_two_ranks(rank: int, schedule: str) -> dict[str, Tensor]:
    return gradients(
        split=["blocks.1"] if schedule == "1F1B" else None, schedule=schedule, gradients=graphpp.Gradients(fused=True)
    )


@pytest.mark.exhaustive
def test_a_parameter_tied_over_ranks() -> None:
    first, second = run_ranks(on_two_ranks, 2, "1F1B")
    assert torch.equal(first["embed.weight"], second["embed.weight"])
    assert_near(first | second, gradients(gradients=graphpp.Gradients(fused=False)), TOLERANCE)
