"""Models that make copies hard: whatever captures without copies captures with them, with the same graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from graphpp.errors import CaptureError
from tests.capture.repeats.same_graph import difference
from tests.exhaustive import further

WIDTH, LAYERS = 4, 8
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
SEEN = SimpleNamespace(calls=0, tensors=[], table=None)


class Layer(nn.Module):
    """One layer whose forward is a function of the layer and its inputs."""

    def __init__(self, index: int, run: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.register_buffer("state", torch.ones(WIDTH))
        self.index, self.run = index, run

    def forward(self, *given: Any) -> Any:
        return self.run(self, *given)


def plain(layer: Any, x: Tensor, *_: Any) -> Any:
    return x + torch.tanh(layer.linear(layer.norm(x)))


class Model(nn.Module):
    """Layers between two projections; `call(model, x)` runs the layers."""

    def __init__(self, run: Callable[..., Any] = plain, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(index, run) for index in range(LAYERS))
        self.call = call or in_order

    def forward(self, x: Tensor) -> Any:
        return self.end(self.call(self, self.begin(x)))


def in_order(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = layer(x)
    return x


def check(model: nn.Module, loss: Any = F.mse_loss) -> None:
    for training in (True, False):
        model.train(training)
        found = []
        for copies in (False, True):
            SEEN.calls, SEEN.table = 0, None
            SEEN.tensors.clear()
            mask.cache_clear()
            batch = Microbatch((X,), target=X)
            try:
                found.append(capture(model, loss, batch, torch.device("cpu"), training=training, copy_layers=copies))
            except CaptureError as error:
                found.append(error)
        one, other = found
        if isinstance(one, CaptureError):
            assert str(one) == str(other)
        else:
            assert difference(other.joint, one.joint) is None
            assert (other.updates, other.output_spec, other.output_leaves) == (one.updates, one.output_spec, one.output_leaves)


# ------------------------------------------------------------------------------------------------- forwards of a layer


@functools.lru_cache
def mask(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size))


def counting(layer: Any, x: Tensor) -> Tensor:
    SEEN.calls += 1
    return x + layer.linear(x) * (2.0 if SEEN.calls % 3 == 0 else 1.0)


def caching(layer: Any, x: Tensor) -> Tensor:
    if getattr(layer, "cached", None) is None:
        layer.cached = torch.ones(3, WIDTH)
    return x + layer.linear(x) * layer.cached


def keeping_in_a_table(layer: Any, x: Tensor) -> Tensor:
    SEEN.table = torch.ones(3, WIDTH) if SEEN.table is None else SEEN.table
    return x + layer.linear(x) * SEEN.table


def keeping_values(layer: Any, x: Tensor) -> Tensor:
    SEEN.tensors.append(layer.linear(x).tanh())
    return x + SEEN.tensors[-1] + SEEN.tensors[0]


def dropping(layer: Any, x: Tensor) -> Tensor:
    rate = 0.9 - 0.05 * (layer.index // 4)
    return x + layer.linear(x) * torch.empty(3, 1).bernoulli_(rate).div_(rate) if layer.training else plain(layer, x)


def writing_a_view(layer: Any, x: Tensor) -> Tensor:
    x[:, 0].mul_(2.0)
    return x + layer.linear(x)


def writing_its_state(layer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        layer.state.mul_(0.9).add_(x.mean(0))
    return x + layer.linear(x)


def giving_its_state(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = plain(layer, x)
    layer.state = y.detach().mean(0)
    return y


def modes_at_both_ends(layer: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            a = layer.norm(x)
        y = layer.linear(a)
    with torch.no_grad():
        z = y * 2
    return x + z.float() + layer.linear(x)


def checkpointed_twice(layer: Any, x: Tensor) -> Tensor:
    y = checkpoint(layer.norm, x, use_reentrant=False)
    return x + checkpoint(lambda z: torch.tanh(layer.linear(z)), y, use_reentrant=False)


def every_third(*_: Any, **__: Any) -> CheckpointPolicy:
    SEEN.calls += 1
    return CheckpointPolicy.MUST_SAVE if SEEN.calls % 3 == 0 else CheckpointPolicy.PREFER_RECOMPUTE


def with_a_policy(layer: Any, x: Tensor) -> Tensor:
    contexts = partial(create_selective_checkpoint_contexts, every_third)
    y: Tensor = checkpoint(partial(plain, layer), x, use_reentrant=False, context_fn=contexts)
    return y


class Counted(torch.autograd.Function):
    """A gradient that depends on the number of calls."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        SEEN.calls += 1
        return grads[0] * (1 + SEEN.calls % 3)


def one_constant_or_two(layer: Any, x: Tensor) -> Tensor:
    constants = SEEN_CONSTANTS
    return x + layer.linear(x) * constants[0] * constants[0 if layer.index < 3 else layer.index]


SEEN_CONSTANTS = [torch.full((WIDTH,), float(index)) for index in range(LAYERS)]

RUNS: dict[str, Callable[..., Any]] = {
    "counter": counting,
    "mask of a cache": lambda layer, x: x + mask(3) @ layer.linear(x),
    "mask of the layer": caching,
    "mask of a table": keeping_in_a_table,
    "values in a list": keeping_values,
    "other rates": dropping,
    "random numbers": lambda layer, x: x + layer.linear(x) * torch.rand(3, WIDTH) + torch.randn_like(x),
    "writes a view": writing_a_view,
    "writes its state": writing_its_state,
    "gives its state": giving_its_state,
    "writes its input": lambda layer, x: x.add_(layer.linear(x)),
    "modes": modes_at_both_ends,
    "two checkpoints": checkpointed_twice,
    "policy that counts": with_a_policy,
    "function that counts": lambda layer, x: x + Counted.apply(layer.linear(x)),
    "constants": lambda layer, x: x + layer.linear(x) * torch.tensor([1.0, 2.0, 3.0, float(layer.index)]),
    "one constant or two": one_constant_or_two,
    "transposed result": lambda layer, x: layer.linear(x).t().contiguous().t(),
    "expanded result": lambda layer, x: plain(layer, x).mean(0, keepdim=True).expand(3, WIDTH),
    "complex": lambda layer, x: x + torch.fft.irfft(torch.fft.rfft(layer.linear(x)).conj(), n=WIDTH),
    "attention": lambda layer, x: F.scaled_dot_product_attention(*[layer.linear(x)[None, None]] * 3, is_causal=True)[0, 0],
    "branch of values": lambda layer, x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (layer.linear(x),)),
    "a size of values": lambda layer, x: x + layer.linear(x) * x[x > 0].sum(),
    "other submodule": lambda layer, x: x + (layer.linear if layer.index < 4 else layer.norm)(x),
}
FIRST = ["mask of a cache", "constants", "policy that counts", "gives its state"]


@pytest.mark.parametrize("name", [*FIRST, *further(*sorted(set(RUNS) - set(FIRST)))])
def test_forwards(name: str) -> None:
    check(Model(RUNS[name]))


@pytest.mark.parametrize("name", ["constants", *further("one constant or two")])
def test_frozen_layers_with_constants(name: str) -> None:
    """Without gradients a constant behind an operator would be copied by another operator."""
    model = Model(RUNS[name])
    model.layers.requires_grad_(False)
    model.begin.requires_grad_(False)
    check(model)


# ------------------------------------------------------------------------------------------------------ uses of layers


def with_losses(model: Any, x: Tensor) -> Tensor:
    losses = []
    for layer in model.layers:
        x = layer(x)
        losses.append(x.square().mean())
    return x + sum(losses)


def dropped_layers(model: Any, x: Tensor) -> Tensor:
    for index, layer in enumerate(model.layers):
        keep = (torch.rand(()) > 0.1 * index).to(x.dtype) if model.training else 1.0
        x = x + (layer(x) - x) * keep
    return x


def half_checkpointed(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = checkpoint(layer, x, use_reentrant=False) if layer.index % 2 else layer(x)
    return x


def offsets(model: Any, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = torch.cat([x[:1], layer(x[1:])])
    return x


def written_results(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = F.relu(layer(x), inplace=True)
    return x


def written_states(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = layer(x)
        with torch.no_grad():
            layer.state.add_(x.mean(0))
    return x


def twice_under_autocast(model: Any, x: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return in_order(model, in_order(model, x))


def doubled_weights(model: Any, x: Any) -> Any:
    for layer in model.layers:
        x = torch.func.functional_call(layer, {name: 2 * each for name, each in layer.named_parameters()}, (x,))
    return x


CALLS: dict[str, Callable[..., Any]] = {
    "losses": with_losses,
    "layer drop": dropped_layers,
    "half checkpointed": half_checkpointed,
    "offsets": offsets,
    "written results": written_results,
    "written states": written_states,
    "twice": twice_under_autocast,
    "other weights": doubled_weights,
    "mapped": lambda model, x: functools.reduce(lambda value, layer: torch.vmap(layer)(value), model.layers, x),
    "one input": lambda model, x: sum(layer(x) for layer in model.layers),
    "backwards": lambda model, x: functools.reduce(lambda value, layer: layer(value), reversed(model.layers), x),
    "one layer": lambda model, x: functools.reduce(lambda value, _: model.layers[0](value), range(LAYERS), x),
}


@pytest.mark.parametrize("name", ["written results", "mapped", *further(*sorted(set(CALLS) - {"written results", "mapped"}))])
def test_calls(name: str) -> None:
    check(Model(call=CALLS[name]))
