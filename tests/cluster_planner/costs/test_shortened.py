"""Costs of a model of whose equal layers a few are traced are those of the model in full."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import graphpp
from graphpp.cluster_planner.costs import ModelCosts, capture_costs
from graphpp.cluster_planner.costs.alike_layers import CalledOnce, stand_ins
from graphpp.cluster_planner.costs.shortened import Shortening
from graphpp.errors import CaptureError
from tests.exhaustive import further


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, by: float) -> Tensor:
        ctx.by = by
        return x / by

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad / ctx.by, None


class Layer(nn.Module):
    """Two linear layers of this inner width, with a mask that has no stage."""

    def __init__(self, inner: int = 24, index: int = 0, keeps: bool = False) -> None:
        super().__init__()
        self.index, self.keeps = index, keeps
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, inner), nn.Linear(inner, 8)
        self.register_buffer("step", torch.ones(8))

    def forward(self, x: Tensor, scale: Tensor, dropped: bool) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x)))) * scale * self.step
        y = F.dropout(y, 0.1) if dropped else y
        y = F.gelu(y) if self.index % 4 == 3 else y
        if self.keeps:
            self.mean = y.mean().detach()
        return x + y.masked_fill(torch.arange(8, device=x.device) > 6, 0.0)


class Stack(nn.Module):
    """Layers that read a trained value of the first stage. `kind`: "plain"; "again": checkpointed, with dropout; "tied": two
    frozen layers share a weight; "skip": one layer is wider, and another one reads a value from further back; "turns": every
    second layer is wider; "stack": the head reads a detached value of each layer in one operator; "count": a buffer counts the
    layers, so no stage starts at one; "between": the stack scales the result of each layer; "hooks": a hook does so;
    "functions": a custom Function does so, by other numbers from the seventh layer on; "index": every fourth layer computes
    more; "mean": the head reads an attribute of each layer; "twice": all layers run again in the opposite order; "state": the
    stack reads a parameter of each layer; "inner": the stack calls modules of layers; "asked": the stack looks for a module of
    each layer before the call."""

    def __init__(self, kind: str, layers: int) -> None:
        super().__init__()
        self.kind, self.embed, self.head = kind, nn.Embedding(16, 8), nn.Linear(8, 16)
        wide = {"skip": [8], "turns": range(1, layers, 2)}.get(kind, [])
        own = [(32 if at in wide else 24, at * (kind == "index"), kind == "mean") for at in range(layers)]
        self.layers = nn.ModuleList(Layer(*each) for each in own)
        self.register_buffer("count", torch.zeros(()))
        if kind == "inner":
            self.layers = nn.ModuleList(nn.ModuleList([layer]) for layer in self.layers)
        if kind == "tied":
            self.layers[1].up.weight = self.layers[0].up.weight
            self.layers[:2].requires_grad_(False)
        for layer in self.layers if kind == "hooks" else ():
            layer.register_forward_hook(lambda layer, args, result: 0.5 * result)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        halve = Halved.apply
        scale, skipped, means = torch.tanh(x), x, list[Tensor]()
        for at, layer in enumerate(self.layers if self.kind != "inner" else (one for each in self.layers for one in each)):
            if self.kind == "asked" and not hasattr(layer, "up"):
                continue
            given = x, scale, self.kind == "again"
            x = checkpoint(layer, *given, use_reentrant=False) if self.kind == "again" else layer(*given)
            x = 0.5 * x if self.kind == "between" else x
            x = halve(x, 2.0 if at < 6 else 3.0) if self.kind == "functions" else x
            skipped = x if at == 0 else skipped
            x = x + skipped if self.kind == "skip" and at == 1 else x
            means += [x.mean().detach()] if self.kind == "stack" else [layer.up.bias[0]] if self.kind == "state" else []
            if self.kind == "count":
                self.count.add_(1.0)
        for layer in reversed(self.layers) if self.kind == "twice" else ():
            x = layer(x, scale, False)
        means += [layer.mean for layer in self.layers] if self.kind == "mean" else []
        return self.head(x) + torch.stack(means).mean() if means else self.head(x)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("kind", "layers", "left_out", "traced"),
    [
        ("tied", 14, 8, 11 + 6),
        *further(("turns", 17, 8, 13 + 9), ("plain", 14, 9, 9 + 5), ("again", 14, 9, 9 + 5), ("skip", 14, 4, 14 + 10)),
        *further(("between", 14, 9, 7 + 14 + 14), ("hooks", 14, 9, 14 + 5)),
        *further(("functions", 14, 6, 7 + 14 + 14), ("twice", 14, 0, 11 + 23 + 28 + 28)),
        *further(*((kind, 14, 0, 9 + 14 + 14) for kind in ("stack", "count", "index")), ("state", 14, 0, 7 + 9 + 14 + 14)),
        *further(("mean", 14, 0, 9 + 9 + 28 + 28)),  # each trace writes attributes, and is made a second time
        *(("inner", 14, 9, 14 + 5), ("asked", 14, 9, 9 + 9 + 5)),
    ],
)
def test_costs_are_those_of_a_model_with_all_layers(
    kind: str, layers: int, left_out: int, traced: int, monkeypatch: Any
) -> None:
    """`traced`: calls of layers in all traces. The first trace skips layers that look alike, the second one those that were
    removed, unless the stack computes between them. If none can be removed, all layers are traced again, twice. A trace without
    the submodules of such layers ends where the model needs one, and is made again with them."""
    calls, forward = list[Layer](), Layer.forward
    monkeypatch.setattr(Layer, "forward", lambda layer, *given: (calls.append(layer), forward(layer, *given))[1])
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    used: list[Shortening] = []

    def costs(whole: bool) -> ModelCosts:
        def made(longest: int, empty: bool) -> Shortening:
            used.append(Shortening(0 if whole else longest, empty))
            return used[-1]

        monkeypatch.setattr(sys.modules[capture_costs.__module__], "Shortening", made)
        return capture_costs(Stack(kind, layers), _loss, graphpp.Microbatch((tokens,), target=tokens), param_dtype=None)

    found = costs(whole=False)
    assert (sum(len(run.others) * len(run.layers) for run in used[-1].runs), len(calls)) == (left_out, traced)
    assert found == costs(whole=True)


def test_layers_whose_parameters_another_module_has_keep_their_submodules() -> None:
    model = Stack("plain", 14)
    model.alias = model.layers[9].up
    pairs = stand_ins(model, 6)[1]
    once = CalledOnce(model, pairs, always=False, empty=pairs)
    with pytest.raises(CaptureError, match="another module has tensors"), once.skipping():
        pass
    assert once.refused and all(len([*layer.children()]) == 3 for layer in model.layers)


class Gaps(Stack):
    """The names of the layers have gaps."""

    def __init__(self) -> None:
        super().__init__("plain", 12)
        self.layers = nn.ModuleDict({str(2 * at): layer for at, layer in enumerate(self.layers)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        scale = torch.tanh(x)
        for layer in self.layers.values():
            x = layer(x, scale, False)
        return self.head(x)


def test_layers_whose_names_have_gaps_are_all_called() -> None:
    assert stand_ins(Gaps(), 6)[1] == {} and stand_ins(Stack("plain", 12), 6)[1] != {}
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    assert capture_costs(Gaps(), _loss, graphpp.Microbatch((tokens,), target=tokens), param_dtype=None).elements > 0
