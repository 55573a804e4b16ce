"""`split="auto"`: the search against all cuts, its caps, the places where stages may start, and its use in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp import Costs, StageCosts, StateBytes
from graphpp.errors import GraphPPError, SplitError
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.planner.auto_split import CutSearch
from graphpp.planner.segments import Pricing, Segments
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.state_bytes import HeldBytes, held_bytes
from tests.distributed import run_ranks
from tests.exhaustive import further


def pieces(count: int, seed: int, blocking: bool = False) -> Segments:
    """Segments of random costs, each with parameters and collectives of its own."""
    draw, shares = Random(seed), Random(seed)
    each = tuple(
        StageCosts(
            draw.choice([0.0, 1.0, 1.0, draw.uniform(0, 4)]),
            draw.uniform(0, 2),
            draw.uniform(0, 2),
            backward=draw.uniform(1, 4),
            saved_bytes=draw.randrange(1, 9),
            kept_bytes=1,
            peak_bytes={Kind.F: draw.randrange(9)},
        )
        for _ in range(count)
    )
    sends = [tuple(draw.choice([0.0, 0.1, 1.0]) for _ in range(count - 1)) for _ in range(2)]
    own = [{kind: shares.choice((0, 0.9)) * one.of(kind) for kind in (Kind.F, Kind.B, Kind.I)} for one in each]
    each = tuple(replace(one, exchanged=seconds) for one, seconds in zip(each, own, strict=True))
    state = tuple(StateBytes((at,), (at,), weights=draw.randrange(100), sums=draw.randrange(100)) for at in range(count))
    return Segments(tuple(range(0, 10 * count, 10)), Costs(each, sends[0], sends[1], blocking=blocking, overlap=0.9), state)


def search(
    segments: Segments, schedule: str, ranks: int, stages: int, caps: Sequence[int] | None = None, microbatches: int = 0
) -> CutSearch:
    table = SCHEDULES[schedule](ranks, stages, microbatches or 2 * ranks)

    def held(state: Sequence[StateBytes]) -> Sequence[HeldBytes]:
        return held_bytes(state, table.rank_of_stage, ranks)

    return CutSearch(segments, table, held, caps)


def all_cuts(count: int, stages: int) -> list[tuple[int, ...]]:
    return [(0, *rest) for rest in combinations(range(1, count), stages - 1)]


CASES = [("1F1B", 3, 3), ("GPipe", 2, 2), ("Interleaved1F1B", 2, 4), ("ZBVZeroBubble", 2, 4)]
OTHERS = [("LoopedBFS", 2, 4), ("InterleavedZeroBubble", 2, 4)]


@pytest.mark.parametrize(("schedule", "ranks", "stages"), [*CASES, *further(*OTHERS)])
@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_no_other_cut_is_faster(schedule: str, ranks: int, stages: int, blocking: bool, seed: int) -> None:
    found = search(pieces(9, seed, blocking), schedule, ranks, stages)
    values = {cut: found.value(cut) for cut in all_cuts(9, stages)}
    assert values[found.best()] == min(values.values())
    assert all(found.bound(cut) <= value[1] * (1 + 1e-6) for cut, value in values.items())


@pytest.mark.parametrize(("schedule", "ranks", "stages"), [("Combined1F1B", 1, 2), ("DualPipeV", 2, 4)])
def test_bounds_stay_below_what_pairs_hide(schedule: str, ranks: int, stages: int) -> None:
    for seed in range(4):
        found = search(pieces(9, seed), schedule, ranks, stages, microbatches=12)
        assert all(found.bound(cut) <= found.value(cut)[1] * (1 + 1e-6) for cut in all_cuts(9, stages))


def test_programs_state_the_share_of_their_collectives() -> None:
    graph = torch.fx.Graph()
    x, ops = graph.placeholder("x"), torch.ops._c10d_functional
    sent = graph.call_function(ops.all_reduce.default, (graph.call_function(torch.ops.aten.mm.default, (x, x)), "sum", "0"))
    graph.output(graph.call_function(ops.wait_tensor.default, (sent,)))
    seconds = {torch.ops.aten.mm.default: 3.0, ops.all_reduce.default: 1.0}
    pricing = Pricing(lambda lowered, sources: {}, float, lambda node: seconds.get(node.target, 0.0))
    assert pricing.exchanged(graph) == 0.25


@pytest.mark.parametrize("seed", range(3))
def test_moves_of_starts_come_near_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphpp.planner.auto_split._LISTED", 0)
    found = search(pieces(11, seed), "1F1B", 3, 3)
    values = {cut: found.value(cut) for cut in all_cuts(11, 3)}
    assert values[found.best()][1] <= 1.1 * min(values.values())[1]
    best = min(values, key=values.__getitem__)
    assert values[found.best([best])] == values[best]


def test_only_cuts_that_fit_count() -> None:
    segments = pieces(9, 1)
    free = search(segments, "1F1B", 2, 2)
    values = {cut: free.value(cut) for cut in all_cuts(9, 2)}
    peaks = sorted(value[2] for value in values.values())
    cap = peaks[1]
    fits = {cut: value for cut, value in values.items() if value[2] <= cap}
    assert values[free.best()][2] > cap, "the case must tell the cap from none"
    assert values[search(segments, "1F1B", 2, 2, [cap, cap]).best()] == min(fits.values())
    none = search(segments, "1F1B", 2, 2, [peaks[0] - 1] * 2).best()
    assert values[none][2] == peaks[0]


# ---------------------------------------------------------------------------------- in a pipeline

ESTIMATED = graphpp.Parallel(op_costs=OpCosts.of("cpu"))  # where a cut must not depend on the processor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mlp(self.norm(x)))


class Tall(nn.Module):
    """Layers, and a head that costs as much as `head` of them."""

    def __init__(self, layers: int, width: int, head: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, head * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def planned(model: nn.Module, example: graphpp.Microbatch, **options: Any) -> list[tuple[str, ...]]:
    """The modules of each stage."""
    found = graphpp.verify(model, mean, example, split="auto", **options)
    found.raise_if_wrong()
    return [stage.modules for stage in found.plan.stages]


def test_a_heavy_head_gets_few_layers() -> None:
    torch.manual_seed(0)
    example = graphpp.Microbatch((torch.randn(64, 256),))
    first, last = planned(Tall(8, 256, 7), example, ranks=2, schedule="1F1B", parallel=ESTIMATED)
    assert first == ("layers.0 .. layers.7",) and last == ("head",)


def trained(rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Tall(6, 64, 4), torch.randn(16, 64)
    pipe = graphpp.compile(model, mean, split="auto", schedule="Interleaved1F1B", microbatches=4)
    losses = pipe.step(x).losses.tolist()
    return losses, {fqn: each.grad for fqn, each in pipe.named_parameters() if each.grad is not None}


def test_a_training_step_has_eagers_bits() -> None:
    torch.manual_seed(0)
    model, x = Tall(6, 64, 4), torch.randn(16, 64)
    expected = [mean(model(part)) for part in x.chunk(4)]
    for loss in expected:
        (loss / 4).backward()
    found = run_ranks(trained, 2)
    assert [losses for losses, _ in found] == [[float(loss.detach()) for loss in expected]] * 2
    grads = {fqn: each for _, held in found for fqn, each in held.items()}
    assert grads.keys() == {fqn for fqn, _ in model.named_parameters()}
    assert all(torch.equal(grads[fqn], each.grad) for fqn, each in model.named_parameters())  # type: ignore[arg-type]


class Counting(nn.Module):
    """Layers that write one buffer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(6))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if number in (1, 3):
                x = x + self.count
                self.count += 1
        return x


def test_a_written_buffer_stays_in_one_stage() -> None:
    example = graphpp.Microbatch((torch.randn(4, 8),))
    assert len(planned(Counting(), example, ranks=4, schedule="1F1B")) == 4


def test_a_cap_moves_the_cut() -> None:
    torch.manual_seed(0)
    example = graphpp.Microbatch((torch.randn(64, 64),))
    options: dict[str, Any] = {"split": "auto", "ranks": 2, "schedule": "1F1B", "microbatches": 2, "parallel": ESTIMATED}
    free = graphpp.verify(Tall(8, 64, 2), mean, example, **options)
    assert free.plan.memory is not None
    most = max(each.peak for each in free.plan.memory.ranks)
    capped = graphpp.verify(Tall(8, 64, 2), mean, example, memory=graphpp.Memory(cap=2 * most), **options)
    assert [stage.modules for stage in capped.plan.stages] == [stage.modules for stage in free.plan.stages]
    with pytest.raises(GraphPPError, match="cap"):
        graphpp.verify(Tall(8, 64, 2), mean, example, memory=graphpp.Memory(cap=1000), **options)


def test_stages_that_do_not_fit_are_refused() -> None:
    example = graphpp.Microbatch((torch.randn(4, 8),))
    with pytest.raises(SplitError, match='split="auto": 6 stages do not fit, the model can be cut into 2 pieces'):
        graphpp.verify(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mean, example, split="auto", ranks=6, schedule="1F1B")
    with pytest.raises(SplitError, match=r'a string: write .* or "auto"'):
        graphpp.verify(nn.Linear(8, 8), mean, example, split="best", ranks=1)  # type: ignore[arg-type]
