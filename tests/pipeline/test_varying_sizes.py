"""One captured graph for several sizes: how often a model is captured, and that each size has eager's numbers, bit for bit."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp import Debug, Gradients, Memory, Microbatch
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.training import capturing

VOCABULARY, WIDTH = 17, 8


class Block(nn.Module):
    """Attention with a mask and a scale made from the length, statistics over the sequence, a slice of a table."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) * (length + 3) ** -0.5
        order = torch.arange(length)
        scores = scores.masked_fill(order[None] > order[:, None], float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, width)
        mixed = mixed - mixed.sum(1, keepdim=True) / (2 * length)
        return x + self.dropout(self.out(mixed))


class Model(nn.Module):
    """Any number of rows and any length up to 64."""

    def __init__(self, dropout: float = 0.0, blocks: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        if self.training:
            self.seen += tokens.numel()
        return self.head(F.pad(x, (0, 0, 1, 0))[:, :-1])


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1000 * rows + length))


def eager(model: nn.Module, parts: Sequence[tuple[Tensor, Tensor]], loss: Callable[..., Tensor] = loss) -> Tensor:
    """The losses of microbatches; gradients are added to the parameters'."""
    losses = []
    for tokens, target in parts:
        value = loss(model(tokens), target)
        (value / len(parts)).backward()
        losses.append(value.detach())
    return torch.stack(losses)


def assert_same_state(model: nn.Module, twin: nn.Module, names: set[str] | None = None) -> None:
    theirs = dict(twin.named_parameters())
    for fqn, parameter in model.named_parameters():
        if names is None or fqn in names:
            assert torch.equal(parameter.grad, theirs[fqn].grad), fqn
    if names is None:
        assert all(map(torch.equal, model.buffers(), twin.buffers()))


OPTIONS: list[dict[str, Any]] = [
    {},
    {"schedule": "ZB1P"},
    {"memory": "full"},
    {"memory": Memory(recompute=0.3)},
    {"schedule": "ZB1P", "memory": "full"},
    {"gradients": Gradients(dtype=torch.float64)},
]
LENGTHS = [(4, 5), (4, 9), (4, 7), (6, 12), (8, 30), (4, 2), (4, 64)]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("options", [OPTIONS[0], *further(*OPTIONS[1:])])
def test_one_graph_serves_all_sizes(options: dict[str, Any]) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    with internals.captures() as made:
        pipe = graphpp.compile(model, loss, split=["blocks.1"], microbatches=2, **options)
        for rows, length in LENGTHS:
            x = tokens(rows, length)
            found = pipe.step(x, target=x)
            losses = eager(twin, list(zip(x.chunk(2), x.chunk(2), strict=True)))
            assert torch.equal(found.losses, losses)
            if options.get("gradients") is None:
                assert_same_state(model, twin)
    # for one size; for all lengths, for all lengths and rows, each after a graph for one size to compare with
    assert [graph.joint.symbols is not None for graph in made] == [False, False, True, False, True]


class Plain(nn.Module):
    """Causal attention, whose operators are the same for all lengths, but for numbers that follow from the length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.qkv = nn.Embedding(VOCABULARY, 4), nn.Embedding(64, 4), nn.Linear(4, 12)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        logits: Tensor = self.head(x + mixed.transpose(1, 2).reshape(x.shape) / (2 * tokens.shape[1]))
        return logits


class Told(Plain):
    """Tells an integer from a symbol, and computes something else for one length."""

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        return super().forward(tokens) * (2 if isinstance(length, int) and length == 6 else 1)


@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("first", [[6, 2, 9, 1], *further([2, 1], [6, 1], [1, 2])])
def test_lengths_of_one_and_two_are_captured_once_each(first: list[int]) -> None:
    model = Plain()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=1, microbatches=1)
    with internals.captures() as made:
        for length in (*first, *range(3, 21), 1, 2):
            x = tokens(2, length)
            assert torch.equal(pipe.step(x, target=x).losses, eager(twin, [(x, x)]))
            assert_same_state(model, twin)
    assert len(made) <= 3


@pytest.mark.usefixtures("shared_captures")
def test_code_that_tells_an_integer_of_a_later_length_is_captured_for_each() -> None:
    model = Told()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=1, microbatches=1)
    for length in (3, 6, 5, 6):
        x = tokens(2, length)
        assert torch.equal(pipe.step(x, target=x).losses, eager(twin, [(x, x)]))


def on_rank(rank: int, schedule: str, options: dict[str, Any]) -> tuple[list[Tensor], dict[str, Tensor], int]:
    stages = 2 if schedule == "1F1B" else 4
    model = Model(dropout=0.2, blocks=stages)
    pipe = graphpp.compile(model, loss, split=stages, schedule=schedule, microbatches=4, **options)
    with capturing("test_varying_sizes"), internals.captures() as made:
        losses = [pipe.step(tokens(8, length), target=tokens(8, length)).losses for length in (6, 4, 9)]
    return losses, {fqn: parameter.grad for fqn, parameter in pipe.named_parameters()}, len(made)


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1F1B", {}),
        *further(
            ("ZBVZeroBubble", {"memory": Memory(recompute="full")}),
            ("Interleaved1F1B", {"memory": Memory(offload=0.5)}),
            ("ZBVZeroBubble", {}),
            ("1F1B", {"memory": Memory(recompute=0.5)}),
        ),
    ],
)
def test_ranks_send_each_size(schedule: str, options: dict[str, Any]) -> None:
    """On two ranks, with dropout: the numbers are those of graphs for one size, also on one rank."""
    several = run_ranks(on_rank, 2, schedule, options)
    alone = run_ranks(on_rank, 2, schedule, options | {"debug": Debug(dynamic=False)})
    assert [made for _, _, made in several] == [3, 0] and [made for _, _, made in alone] == [3, 0]
    for (losses, grads, _), (expected, wanted, _) in zip(several, alone, strict=True):
        assert all(map(torch.equal, losses, expected))
        assert grads.keys() == wanted.keys() and all(torch.equal(grads[fqn], wanted[fqn]) for fqn in grads)


@pytest.mark.usefixtures("shared_captures")
def test_microbatches_of_several_sizes_in_one_step() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=["blocks.1"])
    with internals.captures() as made:
        for lengths in [(5, 5), (9, 9), (3, 12), (12, 3), (7, 20), (30, 31)]:
            parts = [Microbatch((tokens(2, length),), {}, tokens(2, length)) for length in lengths]
            found = pipe.step_microbatches(parts)
            assert torch.equal(found.losses, eager(twin, [(part.args[0], part.target) for part in parts]))
            assert_same_state(model, twin)
    assert len(made) == 3


class Branches(Model):
    """Doubles the output of long sequences."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (2 if tokens.shape[1] > 10 else 1)


@pytest.mark.exhaustive
def test_each_branch_has_its_graph() -> None:
    model = Branches()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=["blocks.1"], microbatches=1)
    with internals.captures() as made:
        for length in (5, 7, 20, 30, 10, 11, 2):
            x = tokens(2, length)
            assert torch.equal(pipe.step(x, target=x).losses, eager(twin, [(x, x)]))
            assert_same_state(model, twin)
    assert len(made) == 5


class Fixed(nn.Module):
    """Looks its length up in a table of the program."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lines = nn.ModuleDict({str(length): nn.Linear(4, 4) for length in (3, 4, 5)})

    def forward(self, x: Tensor) -> Tensor:
        return self.lines[str(int(x.shape[1]))](x)


class Unhashable(nn.Module):
    """Uses its length as a key, which no symbol can be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.scales = nn.Linear(4, 4), {3: 1.0, 4: 2.0, 5: 3.0}

    def forward(self, x: Tensor) -> Tensor:
        return self.line(x) * self.scales[x.shape[1]]


@pytest.mark.parametrize(
    ("kind", "names"), [(Fixed, "test_varying_sizes.py"), *further((Unhashable, "raises|test_varying_sizes.py"))]
)
def test_a_model_that_fixes_its_sizes_is_said_once(kind: Any, names: str, caplog: pytest.LogCaptureFixture) -> None:
    model = kind()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, F.mse_loss, split=1, microbatches=1)
    with internals.captures() as made, caplog.at_level(logging.WARNING, logger="graphpp"):
        for length in (3, 4, 5, 3, 4, 5):
            x = torch.randn(2, length, 4)
            found = pipe.step(x, target=x)
            assert torch.equal(found.losses, eager(twin, [(x, x)], F.mse_loss))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)
    assert len([graph for graph in made if graph.joint.symbols is None]) == 3
    warned = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert len(warned) == 1
    assert re.search(names, warned[0])


@functools.lru_cache(None)
def looked_up(length: int) -> int:
    return 2 * length


class Global:
    longest = 2
    seen: ClassVar[list[Any]] = []


@dataclasses.dataclass(slots=True)
class Slotted:
    longest: int = 2


SLOTTED = Slotted()
LATEST: collections.deque[int] = collections.deque(maxlen=2)
COUNTED: collections.defaultdict[str, int] = collections.defaultdict(lambda: 2)


def tried(length: int) -> int:
    try:
        return {4: 2, 6: 3, 7: 4}[length]
    except (KeyError, TypeError):
        return 1


def noted(length: int) -> int:
    Global.seen.append((length, 3))
    return Global.seen[-1][0]


def kept(length: int) -> int:
    Global.longest = max(Global.longest, length)
    return Global.longest


def kept_elsewhere(length: int) -> int:
    LATEST.append(length)
    COUNTED["val"] = SLOTTED.longest = length
    return SLOTTED.longest


TRICKS: dict[str, Callable[[Tensor], Any]] = {
    "type": lambda x: 2 if isinstance(x.shape[1], int) else 3,
    "float type": lambda x: 2 if type(x.shape[1] * 0.5) is float else 3,
    "text": lambda x: len(f"{x.shape[1]}"),
    "representation": lambda x: len(repr(tuple(x.shape))),
    "caught hash": lambda x: tried(x.shape[1]),
    "cache": lambda x: looked_up(x.shape[1]),
    "two roundings": lambda x: (x.shape[1] * 0.1 + 1e16 - 1e16) + 1,
    "branch on two roundings": lambda x: 2 if (x.shape[1] + 0.1) + 0.2 > x.shape[1] + 0.30000000000000004 else 3,
    "one rounding": lambda x: x.shape[1] * 0.3,
    "quotient": lambda x: x.shape[1] / 7,
    "comparison": lambda x: x.shape[1] > 6,
    "comparison as a tensor": lambda x: torch.full((1,), x.shape[1] > 6),
    "object": lambda x: kept(x.shape[1]),
    "list of an object": lambda x: noted(x.shape[1]),
    "other containers": lambda x: kept_elsewhere(x.shape[1]),
    "close factors": lambda x: (x.double() * (x.shape[1] * 0.3) - x.double() * (x.shape[1] * (0.1 + 0.2))).float() * 1e15,
}


LEADING = ["caught hash", "two roundings", "object"]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", [*LEADING, *further(*(name for name in TRICKS if name not in LEADING))])
def test_code_that_can_tell_a_symbol_from_an_integer(name: str) -> None:
    class Tricky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.last(x * TRICKS[name](x))

    model, twin = Tricky(), Tricky()
    pipe = graphpp.compile(model, F.mse_loss, split=["last"], microbatches=1)
    for length in (4, 6, 7, 12):
        x = torch.randn(3, length, 4, generator=torch.Generator().manual_seed(length))
        Global.longest, Global.seen = 2, []
        found = pipe.step(x, target=x)
        Global.longest, Global.seen = 2, []
        assert torch.equal(found.losses, eager(twin, [(x, x)], F.mse_loss)), length
        assert_same_state(model, twin)


@pytest.mark.exhaustive
def test_strides_of_integers_are_the_callers() -> None:
    class Strided(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) * tokens.stride(0)

    model = Strided()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=["blocks.1"], microbatches=1)
    for length in (5, 8, 6):
        x = tokens(4, length)[:, :-1]
        assert torch.equal(pipe.step(x, target=x).losses, eager(twin, [(x, x)]))
        assert_same_state(model, twin)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("recompute", ["full", *further(None)])
def test_bytes_are_counted_for_each_size(recompute: str | None) -> None:
    options: dict[str, Any] = {"split": ["blocks.1"], "microbatches": 2, "schedule": "ZB1P", "memory": recompute}
    pipes = [graphpp.compile(Model(), loss, debug=Debug(dynamic=dynamic), **options) for dynamic in (None, False)]
    for length in (5, 9, 40):
        for pipe in pipes:
            pipe.step(tokens(4, length), target=tokens(4, length))
    found, expected = (internals.last_lowered(pipe).programs[0] for pipe in pipes)
    assert found.values is not None and expected.values is None
    for mine, theirs in zip(found.stages, expected.stages, strict=True):
        assert (mine.saved_bytes, mine.kept_bytes) == (theirs.saved_bytes, theirs.kept_bytes)
        assert [each.peak_bytes for each in mine.programs.values()] == [each.peak_bytes for each in theirs.programs.values()]
    layouts = [
        [(meta.shape, meta.stride, meta.dtype) for each in program.boundaries for meta in (*each.forward, *each.backward)]
        for program in (found, expected)
    ]
    assert layouts[0] == layouts[1]


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_captures")
def test_the_memory_cap_holds_for_each_size() -> None:
    memory = Memory(cap=200_000)
    pipe = graphpp.compile(Model(blocks=4), loss, split=["blocks.2"], microbatches=2, memory=memory)
    for length in (5, 9, 6):
        pipe.step(tokens(4, length), target=tokens(4, length))
    with pytest.raises(graphpp.ScheduleError, match="more than the cap"):
        pipe.step(tokens(4, 64), target=tokens(4, 64))
    pipe.step(tokens(4, 5), target=tokens(4, 5))


def test_evaluation_of_several_sizes() -> None:
    model = Model()
    pipe = graphpp.compile(model, loss, split=["blocks.1"], microbatches=2)
    twin = copy.deepcopy(model).eval()
    with internals.captures() as made:
        for length in (4, 6, 8, 10):
            x = tokens(4, length)
            found = pipe.eval(x, target=x)
            assert torch.equal(found.output, torch.cat([twin(part) for part in x.chunk(2)]))
    assert len(made) == 3


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize(
    "backend", [lambda module, examples: module, *further("inductor", lambda module, examples: copy.copy(module))]
)
def test_regions_serve_all_sizes(backend: Any) -> None:
    model = Model(dropout=0.1)
    expected = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=["blocks.1"], microbatches=2, backend=backend)
    plain = graphpp.compile(expected, loss, split=["blocks.1"], microbatches=2, debug=Debug(dynamic=False))
    for length in (5, 9, 7):
        x, losses = tokens(4, length), []
        for each in (pipe, plain):
            torch.manual_seed(length)
            losses.append(each.step(x, target=x).losses)
        torch.testing.assert_close(*losses)
        for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("shared_captures")
@pytest.mark.parametrize("dynamic", [True, *further(False)])
def test_the_option(dynamic: bool) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, loss, split=["blocks.1"], microbatches=1, debug=Debug(dynamic=dynamic))
    with internals.captures() as made:
        for rows, length in [(2, 5), (3, 9), (2, 9)]:
            x = tokens(rows, length)
            assert torch.equal(pipe.step(x, target=x).losses, eager(twin, [(x, x)]))
            assert_same_state(model, twin)
    assert len(made) == (2 if dynamic else 3)
    with pytest.raises(graphpp.GraphPPError, match=r"debug\.dynamic"):
        graphpp.compile(model, loss, debug=Debug(dynamic="yes"))  # type: ignore[arg-type]


def noting_loss(logits: Tensor, target: Tensor) -> Tensor:
    """A loss with a slice that is the whole, and with an operation that no result needs and only the data sizes."""
    logits[target > 3].sum()
    return loss(logits[:, -target.shape[1] :], target)


@pytest.mark.usefixtures("shared_captures")
def test_operations_without_a_use_leave_sizes_open_and_outputs_are_kept() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    pipe = graphpp.compile(model, noting_loss, split=["blocks.1"], microbatches=1, memory=Memory(outputs=True))
    with internals.captures() as made:
        for length in (5, 9, 7):
            x = tokens(2, length)
            logits = twin(x)
            found = pipe.step(x, target=x)
            assert torch.equal(found.losses, eager(twin, [(x, x)])) and torch.equal(found.output, logits)
            assert_same_state(model, twin, {"head.weight"})
    assert [graph.joint.symbols is not None for graph in made] == [False, False, True]
