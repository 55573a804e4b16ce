"""The costs of a model whose words are cut, made from those of a whole head, beside a capture of the cut model."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import graphpp
from graphpp.capture.source_lines import inside_call
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import Degrees, ModelCosts
from graphpp.cluster_planner.costs.operations import Size
from graphpp.cluster_planner.costs.word_parts import can_cut_words, with_word_parts
from graphpp.passes.forward.cut_words import WordParts, cut_words
from graphpp.passes.forward.head_and_loss import weights_of_heads

WORDS, WIDTH, PARTS = 4096, 8, 4


class Decoder(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
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
    cut_words(module, WordParts(order, order), inside_call, None)
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
    assert can_cut_words(whole)
    found = with_word_parts(whole, PARTS)
    module = import_module("graphpp.cluster_planner.costs.capture_costs")  # the package has a function of this name
    monkeypatch.setattr(module, "weights_of_heads", cut)
    expected = costs_of(tied)
    # The first part begins with the head's own call.
    assert [name.removesuffix(".words0") for name in found.names] == list(expected.names)
    assert len(found.forward) == len(expected.forward) == len(found.names) - 1
    assert sum(each.elements for each in found.parameters) == whole.elements
    assert sorted(each.readers for each in found.parameters) == sorted(each.readers for each in expected.parameters)
    for name, one, other in zip(found.names, totals(found, variant), totals(expected, variant), strict=True):
        assert one[:2] == pytest.approx(other[:2], rel=0.02), name
        if name.startswith("head"):
            assert one[2:] == pytest.approx(other[2:], rel=0.01), name


def test_a_head_that_is_not_alone_stays_whole() -> None:
    class Averaged(Decoder):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(tokens) + self.head.weight.mean()

    with torch.device("meta"):
        model, tokens = Averaged(tied=False), torch.empty(2, 16, dtype=torch.int64)
    assert not can_cut_words(capture_costs(model, loss, graphpp.Microbatch((tokens,), target=tokens), param_dtype=None))
