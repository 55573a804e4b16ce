"""Pipelines whose ranks train on a GPU and speak NCCL: the numbers of one process there, bit for bit.

`GRAPHPP_TEST_DEVICE=cuda pytest -m nccl` runs these tests, and those of other files with the mark, on GPUs
(tests/distributed.py); without the variable they run on the CPU over gloo. The model has a skip connection, a tied weight, a
buffer and dropout; its width is 64. On CUDA another stream of the user's computes beside each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.generate.read import default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import batch_p2p
from tests.distributed import DEVICE, on_cpu, run_ranks
from tests.training import local_grads, unequal

pytestmark = pytest.mark.nccl
LAYERS, WIDTH, VOCAB, ROWS, MICROBATCHES, STEPS = 8, 64, 96, 16, 8, 2
BATCHED = "in P2P batches"  # after a schedule's name
NAMES = (*(name for name in SCHEDULES if name not in ("auto", "ForwardOnly")), f"1F1B {BATCHED}", f"ZBVZeroBubble {BATCHED}")


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1)
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """The first layer's output is read again by the head, whose weight is the embedding's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        first = x = self.layers[0](self.embed(tokens))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.head(x + 0.5 * first)


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(number: int, length: int = 12) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCAB, (ROWS, length + 1), generator=torch.Generator().manual_seed(number)).to(DEVICE)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def pipeline(schedule: str, dropout: float = 0.1, **options: Any) -> graphpp.Pipeline:
    """A pipeline over all ranks; one rank has two stages, because each stage sums gradients of the tied weight by itself."""
    name, ranks = schedule.removesuffix(f" {BATCHED}"), dist.get_world_size()
    stages = default_stages(name, ranks) if ranks > 1 else 2
    table: Any = name
    if name != schedule:
        table = batch_p2p(add_send_recv(make_table(name, ranks, stages, MICROBATCHES)), ("all",))
    cuts = [f"layers.{stage * LAYERS // stages}" for stage in range(1, stages)]
    given = {"split": cuts, "schedule": table, "microbatches": MICROBATCHES, **options}
    return graphpp.compile(Model(dropout), loss, **given)


def beside() -> None:
    """On CUDA, keep another stream busy for some milliseconds."""
    if DEVICE.type == "cuda":
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.randn(1024, 1024, device=DEVICE)
            for _ in range(20):
                x = (x @ x).tanh()


Numbers = dict[str, Tensor | None]


def numbers(pipe: graphpp.Pipeline, losses: Sequence[Tensor]) -> Numbers:
    """All that a training leaves on this rank; losses are known to all ranks."""
    parameters = {f"parameter {fqn}": each.detach() for fqn, each in pipe.named_parameters()}
    found = {f"gradient {fqn}": each for fqn, each in local_grads(pipe).items()} | parameters
    return on_cpu(found | {f"buffer {fqn}": each for fqn, each in pipe.named_buffers()} | {"losses": torch.cat(list(losses))})


def stepped(pipe: graphpp.Pipeline, lengths: Sequence[int] = (12, 12), **given: Any) -> Numbers:
    """Steps of AdamW with clipping, two calls accumulated in each, and an evaluation between."""
    losses, optimizer = list[Tensor](), None
    for number, length in enumerate(lengths):
        if optimizer is not None:
            optimizer.zero_grad()
        for half in range(2):
            tokens, target = batch(2 * number + half, length)
            beside()
            torch.manual_seed(10 * number + half)
            losses.append(pipe.step(tokens, target=target, accumulation_steps=2, **given).losses)
        losses.append(pipe.clip_grad_norm_(0.5)[None])
        optimizer = optimizer or torch.optim.AdamW(list(pipe.parameters()), lr=1e-2)
        optimizer.step()
        tokens, target = batch(100, length)
        evaluated = pipe.eval(tokens, target=target).losses
        losses.append(evaluated)
    return numbers(pipe, losses)


def each_schedule(rank: int, names: Sequence[str], options: Mapping[str, Any]) -> dict[str, Numbers]:
    return {name: stepped(pipeline(name, **options)) for name in names}


def unlike(parts: Sequence[Numbers], expected: Numbers) -> list[str]:
    """The names of the numbers that differ from one process's, and of those that no rank has."""
    differing = [f"rank {at}: {name}" for at, part in enumerate(parts) for name in unequal(part, of(part, expected))]
    return differing + sorted(expected.keys() - {name for part in parts for name in part})


def of(part: Numbers, whole: Numbers) -> Numbers:
    return {name: whole[name] for name in part if name in whole}


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("names", [("1F1B", f"ZBVZeroBubble {BATCHED}"), NAMES[::3], NAMES[1::3], NAMES[2::3]])
def test_schedules_have_the_bits_of_one_process(ranks: int, names: Sequence[str]) -> None:
    expected = run_ranks(each_schedule, 1, ("auto",), {})[0]["auto"]
    parts = run_ranks(each_schedule, ranks, names, {})
    assert {name: found for name in names if (found := unlike([part[name] for part in parts], expected))} == {}


def with_lengths(rank: int, schedule: str) -> Numbers:
    return stepped(pipeline(schedule), (12, 7, 12, 16))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "ZBVZeroBubble"])
def test_lengths_vary_between_steps(schedule: str) -> None:
    (expected,) = run_ranks(with_lengths, 1, "auto")
    assert unlike(run_ranks(with_lengths, 2, schedule), expected) == []


def with_options(rank: int, schedule: str, options: Mapping[str, Any]) -> Numbers:
    return stepped(pipeline(schedule, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("options", [{"memory": "full"}, {"memory": graphpp.Memory(offload=True)}])
def test_recomputed_and_offloaded_values(options: Mapping[str, Any]) -> None:
    (expected,) = run_ranks(with_options, 1, "auto", {})
    assert unlike(run_ranks(with_options, 2, "Interleaved1F1B", options), expected) == []


@pytest.mark.exhaustive
def test_inductor_but_for_rounding() -> None:
    """Without dropout: compiled kernels contract products and sums, so values round otherwise."""
    (expected,) = run_ranks(once, 1, "auto", "eager")
    for part in run_ranks(once, 2, "Interleaved1F1B", "inductor"):
        torch.testing.assert_close(part, of(part, expected), rtol=1e-4, atol=1e-6)


def once(rank: int, schedule: str, backend: str) -> Numbers:
    pipe = pipeline(schedule, 0.0, backend=backend)
    tokens, target = batch(0)
    return numbers(pipe, [pipe.step(tokens, target=target).losses])


def scaled(rank: int, schedule: str) -> Numbers:
    """Three steps with a `GradScaler`; the gradients of the second overflow."""
    pipe, scaler = pipeline(schedule, 0.0), torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=1)
    optimizer, losses = None, list[Tensor]()
    for number in range(3):
        tokens, target = batch(number)
        weight = 3e38 if number == 1 else 1.0
        losses.append(pipe.step(tokens, target=target, scaler=scaler, loss_weight=[weight] * MICROBATCHES).losses)
        optimizer = optimizer or torch.optim.SGD(list(pipe.parameters()), lr=0.1)
        scaler.unscale_(optimizer)
        losses.append(pipe.clip_grad_norm_(1.0)[None].isfinite())
        scaler.step(optimizer)
        scaler.update()
        losses.append(torch.tensor([scaler.get_scale()], device=DEVICE))
        optimizer.zero_grad()
    return numbers(pipe, losses)


@pytest.mark.exhaustive
def test_an_overflow_skips_the_step_of_all_ranks() -> None:
    (expected,) = run_ranks(scaled, 1, "auto")
    assert unlike(run_ranks(scaled, 2, "1F1B"), expected) == []


def saves(rank: int, folder: Path) -> Numbers:
    return training(folder, "1F1B", saving=True)


def resumes(rank: int, folder: Path, schedule: str) -> Numbers:
    return training(folder, schedule, saving=False)


def training(folder: Path, schedule: str, *, saving: bool) -> Numbers:
    """Two steps and a checkpoint, or what was saved; then one more step."""
    pipe, losses = pipeline(schedule, 0.0), list[Tensor]()
    tokens, target = batch(0)
    pipe.prepare(tokens, target=target)
    optimizer = torch.optim.AdamW(list(pipe.parameters()), lr=1e-2)
    if not saving:
        pipe.checkpoint(optimizer).load(folder)
    for number in (0, 1, 2) if saving else (2,):
        if saving and number == 2:
            pipe.checkpoint(optimizer).save(folder)
        optimizer.zero_grad()
        tokens, target = batch(number)
        losses = [pipe.step(tokens, target=target).losses]
        optimizer.step()
    return numbers(pipe, losses)


@pytest.mark.exhaustive
def test_a_checkpoint_of_two_ranks_is_loaded_by_one_and_by_four(tmp_path: Path) -> None:
    parts = run_ranks(saves, 2, tmp_path / "checkpoint")
    expected = {name: value for part in parts for name, value in part.items()}
    assert unlike(run_ranks(resumes, 1, tmp_path / "checkpoint", "auto"), expected) == []
    assert unlike(run_ranks(resumes, 4, tmp_path / "checkpoint", "1F1B"), expected) == []
