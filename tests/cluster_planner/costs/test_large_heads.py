"""The costs of a model with another head, made from those of a whole head, beside a capture of that head; and plans with it."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.capture.source_lines import inside_call
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.large_heads import with_logits_tokens, with_word_parts
from graphpp.cluster_planner.costs.model_costs import Degrees, ModelCosts
from graphpp.cluster_planner.costs.operations import Size
from graphpp.passes.forward.chunk_logits import chunk_logits
from graphpp.passes.forward.cut_words import WordParts, cut_words
from graphpp.passes.forward.head_and_loss import weights_of_heads

WORDS, WIDTH, PARTS = 4096, 8, 4


class Decoder(nn.Module):
    def __init__(self, *, tied: bool, times: int = 1) -> None:
        super().__init__()
        words, width = times * WORDS, times * WIDTH
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: Tensor = self.head(x)
        return logits


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def costs_of(tied: bool) -> ModelCosts:
    with torch.device("meta"):
        model, tokens = Decoder(tied=tied), torch.empty(2, 16, dtype=torch.int64)
    return capture_costs(model, loss, graphpp.Microbatch((tokens,), target=tokens), param_dtype=None)


def cut(module: fx.GraphModule) -> set[str]:
    """Cuts the words in the capture."""
    found, order = weights_of_heads(module), tuple(range(PARTS))
    cut_words(module, WordParts(order, order), inside_call, None, training=True)
    return found


def totals(costs: ModelCosts, variant: str | None) -> list[tuple[float, float, float, float]]:
    """Of each segment the FLOPs of a forward, those of all products of a backward, saved bytes, and its largest peak."""
    amount = Degrees(1.0).amount

    def flops(phase: tuple[tuple[object, int], ...]) -> float:
        return sum(count * amount(operation.flops) for operation, count in phase)  # type: ignore[attr-defined]

    def largest(sizes: tuple[Size, ...]) -> float:
        return max(map(amount, sizes), default=0.0)

    kinds = [costs.variants[variant].kinds[at] for at in costs.variants[variant].kind_of]
    return [(flops(k.operations[0]), flops(k.operations[1]), amount(k.saved), largest(k.peaks[1])) for k in kinds]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", [None, "full"])
def test_shares_are_those_of_a_model_with_cut_words(tied: bool, variant: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = costs_of(tied)
    assert whole.head == ("tokens.weight" if tied else "head.weight")
    assert whole.has_head
    found = with_word_parts(whole, PARTS)
    module = import_module("graphpp.cluster_planner.costs.capture_costs")  # the package has a function of this name
    monkeypatch.setattr(module, "weights_of_heads", cut)
    expected = costs_of(tied)
    # The first part begins with the head's own call.
    assert [name.partition(".words[0]")[0].partition(".lookup[0]")[0] for name in found.names] == list(expected.names)
    assert len(found.forward) == len(expected.forward) == len(found.names) - 1
    assert sum(each.elements for each in found.parameters) == whole.elements
    assert sorted(each.readers for each in found.parameters) == sorted(each.readers for each in expected.parameters)
    for name, one, other in zip(found.names, totals(found, variant), totals(expected, variant), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=0.02), name
        if name.startswith("head"):
            assert one[2:] == pytest.approx(other[2:], rel=0.01), name


def in_pieces(module: fx.GraphModule) -> set[str]:
    """Lets the head work through 8 tokens at a time in the capture."""
    found = weights_of_heads(module)
    chunk_logits(module, 8, None)
    return found


def test_pieces_have_the_bytes_of_a_captured_head(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = costs_of(False)
    found = with_logits_tokens(whole, 8)
    monkeypatch.setattr(import_module("graphpp.cluster_planner.costs.capture_costs"), "weights_of_heads", in_pieces)
    expected = costs_of(False)
    assert found.names == expected.names
    one, other, before = totals(found, None)[-1], totals(expected, None)[-1], totals(whole, None)[-1]
    assert one[0] == pytest.approx(other[0]), "all products are in the forward"
    assert one[1] == other[1] == 0
    assert one[2:] == pytest.approx(other[2:], rel=0.05)
    assert one[3] < before[3] / 2


def plan_of(name: str) -> graphpp.TrainingPlan:
    """The best plan on two GPUs with this kind of head, for a larger model with the same names."""
    with torch.device("meta"):
        model, tokens = Decoder(tied=False, times=32), torch.empty(1, 2048, dtype=torch.int64)
    plans = graphpp.plan(
        model, loss, graphpp.Microbatch((tokens,), target=tokens), machines="2xH100", batch=16, pp=2, rows=1, work=1_000,
        memory_cap=3 * 2**29 if name == "logits in pieces" else None,
    )  # fmt: skip
    return next(plan for plan in plans if name in str(plan.setting))


@pytest.mark.parametrize("name", ["words cut", "logits in pieces"])
def test_a_plan_with_another_head_runs(name: str) -> None:
    plan = graphpp.TrainingPlan.from_json(plan_of(name).to_json())
    tokens = torch.randint(WORDS, (plan.setting.rows, 8), generator=torch.Generator().manual_seed(1))
    found = graphpp.verify(Decoder(tied=False), loss, graphpp.Microbatch((tokens,), target=tokens), plan=plan)
    found.raise_if_wrong()
    assert found.plan.stages[-1].modules[-1] == ("head.words[1]" if name == "words cut" else "head")


def test_a_head_that_is_not_alone_stays_whole() -> None:
    class Averaged(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.head.weight.mean()

    with torch.device("meta"):
        model, tokens = Averaged(tied=False), torch.empty(2, 16, dtype=torch.int64)
    assert not capture_costs(model, loss, graphpp.Microbatch((tokens,), target=tokens), param_dtype=None).has_head
