"""Copies of traced calls equal the trace of all calls, node by node; where they might not, all calls are traced."""

from __future__ import annotations

import copy
import importlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import graphpp
from graphpp.batch.microbatch import Microbatch
from graphpp.capture.trace import capture
from tests import internals
from tests.capture.repeats.same_graph import difference
from tests.exhaustive import further
from tests.zoo.models import ZOO

WIDTH, LAYERS = 4, 7
X = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
Forward = Callable[["Layer", Tensor], Any]


def plain(layer: Layer, x: Tensor) -> Tensor:
    """A residual layer."""
    return x + layer.second(F.gelu(layer.first(x))) * layer.scale


class Layer(nn.Module):
    """One layer whose forward is a function of the layer and its input."""

    def __init__(self, index: int, forward: Forward = plain) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("count", torch.zeros(()))
        self.index, self.run = index, forward

    def forward(self, x: Tensor, *rest: Any, **named: Any) -> Any:
        return self.run(self, x, *rest, **named)


def through(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


class Model(nn.Module):
    """Layers between two projections; `call(layers, x)` runs the layers."""

    def __init__(self, forward: Forward = plain, call: Callable[..., Tensor] = through, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin, self.end = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(index, forward) for index in range(layers))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.end(self.call(self.layers, self.begin(x)))
        return output


def check(model: nn.Module, batch: Microbatch, loss: Any, replaced: int, training: bool = True) -> None:
    """The graph with copies of `replaced` calls equals the graph of a full trace."""
    model.train(training)
    run = partial(capture, model, loss, batch, torch.device("cpu"), training=training)
    with internals.replaced_calls() as calls:
        copied = run()
    traced = run(copy_layers=False)
    assert difference(copied.joint, traced.joint) is None
    assert len(calls) == replaced, calls


def check_model(model: nn.Module, replaced: int, training: bool = True) -> None:
    check(model, Microbatch((X,), target=X), F.mse_loss, replaced, training)


# ------------------------------------------------------------------------------------------------------- equal calls


def dropped(layer: Layer, x: Tensor) -> Tensor:
    return x + F.dropout(layer.second(layer.first(x)), 0.5, layer.training)


def under_autocast(layer: Layer, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x + layer.second(layer.first(x))


def detached(layer: Layer, x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = layer.first(x).sum(-1, keepdim=True).sigmoid()
    return x + layer.second(F.relu(layer.first(x))) * gate


def used_twice(layer: Layer, x: Tensor) -> Tensor:
    return layer.second(layer.first(layer.second(layer.first(x))))


def unused_parameter(layer: Layer, x: Tensor) -> Tensor:
    return x * layer.scale


def in_place(layer: Layer, x: Tensor) -> Tensor:
    y = layer.second(layer.first(x))
    y += x
    y.mul_(layer.scale)
    return y


def strided(layer: Layer, x: Tensor) -> Tensor:
    return layer.second(layer.first(x)).t().contiguous().t()


def checkpointed(layer: Layer, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(lambda z: layer.second(F.gelu(layer.first(z))), x, use_reentrant=False)
    return x + y


def permuted(layer: Layer, x: Tensor) -> Tensor:
    order = torch.argsort(x[:, 0])
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return x + layer.second(F.gelu(layer.first(x[order])))[back]


class Doubled(torch.autograd.Function):
    """Twice a tensor, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


def with_function(layer: Layer, x: Tensor) -> Tensor:
    return x + Doubled.apply(layer.second(layer.first(x)))


EQUAL = [
    plain, dropped, under_autocast, detached, used_twice, unused_parameter, in_place, permuted, checkpointed,
]  # fmt: skip


@pytest.mark.parametrize("forward", EQUAL)
def test_copies_equal_the_trace(forward: Forward) -> None:
    check_model(Model(forward), LAYERS - 2)


def test_a_layer_that_takes_other_strides_is_traced() -> None:
    check_model(Model(strided), LAYERS - 3)  # the first one


@pytest.mark.parametrize("forward", [plain, checkpointed])
def test_copies_in_an_evaluation(forward: Forward) -> None:
    check_model(Model(forward), LAYERS - 2, training=False)


@pytest.mark.parametrize("training", [True, False])
def test_custom_functions_are_traced(training: bool) -> None:
    """Their own code runs in the trace, and may compute something else in every call."""
    check_model(Model(with_function), 0, training)


def each_checkpointed(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def saving_products() -> Any:
    def policy(ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def each_checkpointed_selectively(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=False, context_fn=saving_products)
    return x


def under_one_autocast(layers: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return through(layers, x)


def twice(layers: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return through(layers, through(layers, x))


def backwards(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in reversed(layers):
        x = F.relu(layer(x))
    return x


def written_between(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
        x.add_(1.0)
    return x


@pytest.mark.parametrize(
    "call", [each_checkpointed, each_checkpointed_selectively, under_one_autocast, backwards]
)
def test_calls_in_other_ways(call: Callable[..., Tensor]) -> None:
    check_model(Model(call=call), LAYERS - 2)


def test_layers_that_run_twice(caplog: pytest.LogCaptureFixture) -> None:
    check_refused(Model(call=twice), "is not the only reader of", caplog)
    model = Model(call=twice).requires_grad_(False)
    model.end.requires_grad_(True)
    check_model(model, 2 * (LAYERS - 2))
    check_model(Model(call=twice), 2 * (LAYERS - 2), training=False)


def test_some_modes_and_flags_make_other_kinds_of_calls() -> None:
    def halves(layers: nn.ModuleList, x: Tensor) -> Tensor:
        for at, layer in enumerate(layers):
            with torch.autocast("cpu", torch.bfloat16, enabled=at >= 4):
                x = layer(x).float()
        return x

    check_model(Model(call=halves, layers=8), 4)  # of each kind two are traced


def test_frozen_layers() -> None:
    model = Model()
    for layer in model.layers[:4]:
        layer.requires_grad_(False)
    model.begin.requires_grad_(False)
    check_model(model, 0)  # 4 frozen layers and 3 others: neither are enough
    model = Model(layers=14)
    for module in (model.begin, *model.layers[:7]):
        module.requires_grad_(False)
    check_model(model, 5 + 4)  # the first trained layer takes a tensor without gradient, and is traced without operators


def test_an_index_that_is_not_read_does_not_count() -> None:
    layers = Model().layers
    assert len({layer.index for layer in layers}) == LAYERS
    check_model(Model(), LAYERS - 2)


# --------------------------------------------------------------------------------------------- calls that are not equal


def reads_index(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.second(layer.first(x)) * (0.5 if layer.index > 3 else 1.0)


def formats_index(layer: Layer, x: Tensor) -> Tensor:
    return x + layer.second(layer.first(x)) * float(f"{layer.index}.5")


def writes_argument(layer: Layer, x: Tensor) -> Tensor:
    x.mul_(2.0)
    return x + layer.second(layer.first(x))


def writes_buffer(layer: Layer, x: Tensor) -> Tensor:
    layer.count.add_(1.0)
    return x + layer.second(layer.first(x))


def returns_argument(layer: Layer, x: Tensor) -> Tensor:
    return x


def returns_view(layer: Layer, x: Tensor) -> Tensor:
    return x.view_as(x)


COLLECTED: list[Tensor] = []


def collects(layer: Layer, x: Tensor) -> Tensor:
    y: Tensor = layer.second(layer.first(x))
    COLLECTED.append(y.square().mean())
    return x + y


DIFFERENT = [
    (formats_index, "layers.1 runs other operators than layers.0"),
    (writes_argument, "writes into an argument"),
    (writes_buffer, "a parameter or a buffer that is written"),
    (returns_argument, "the forward calls too few of them"),
    (returns_view, "returns a view of an argument"),
]


def check_refused(model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture, loss: Any = F.mse_loss) -> None:
    """All layers are traced, and a line says why."""
    caplog.set_level(logging.INFO, "graphpp")
    run = partial(capture, model.train(), loss, Microbatch((X,), target=X), torch.device("cpu"))
    found = run()
    assert reason in caplog.text
    assert "please report this fault" not in caplog.text
    assert difference(found.joint, run(copy_layers=False).joint) is None


@pytest.mark.parametrize(("forward", "reason"), DIFFERENT)
def test_other_calls_are_traced(forward: Forward, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    check_refused(Model(forward), reason, caplog)


def test_some_layers_are_unlike_the_others() -> None:
    check_model(Model(reads_index), 2 + 1)
    check_model(Model(call=exchanged_submodule), LAYERS - 3)


def test_values_that_leave_by_a_list() -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        collected = torch.stack(COLLECTED).sum()
        COLLECTED.clear()
        return F.mse_loss(output, target) + collected

    check(Model(collects), Microbatch((X,), target=X), loss, LAYERS - 2)


def skipping(layers: nn.ModuleList, x: Tensor) -> Tensor:
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = layer(x)
    return x + sum(inputs)


def exchanged_submodule(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for at, layer in enumerate(layers):
        before = layer.second.forward
        layer.second.forward = (lambda z, run=before: 2 * run(z)) if at == 5 else before
        x = layer(x)
        del layer.second.forward
    return x


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (skipping, "is not the only reader of"),
        (written_between, "a buffer that is written"),
    ],
)
def test_other_uses_of_layers_are_traced(call: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    check_refused(Model(call=call), reason, caplog)


def test_a_loss_that_reads_parameters(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + sum(layer.scale.square().sum() for layer in model.layers)

    check_refused(model, "is not the only reader of", caplog, loss)


def test_a_submodule_that_is_called_from_elsewhere(caplog: pytest.LogCaptureFixture) -> None:
    def first_of_last(layers: nn.ModuleList, x: Tensor) -> Tensor:
        return through(layers, x) + layers[0].first(x).sum()

    model = Model(call=first_of_last)
    for layer in model.layers:
        layer.requires_grad_(False)
    check_refused(model, "", caplog)


# ------------------------------------------------------------------------------------------------------ known models

DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")


def deepen(config: Any, layers: int) -> None:
    """Give a configuration of transformers, with those of its parts, this number of layers."""
    for name in DEPTHS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, layers)
    if type(config).__name__ != "MambaConfig" and getattr(config, "layer_types", None):
        config.layer_types = (config.layer_types * layers)[:layers]
    for part in ("text_config", "vision_config"):
        if getattr(config, part, None) is not None:
            deepen(getattr(config, part), layers)


# The calls of 8 layers (of each tower) that are replaced by copies.
REPLACED = {
    "llama": 6, "qwen3": 6, "gemma": 6, "mistral": 6, "gpt2": 6, "bert": 6, "vit": 6, "mamba": 6, "clip": 12,
    "whisper": 18,  # 12 in the attempt after which the decoder is traced, then 6 of the encoder
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", *further("llama", "qwen3", "gemma", "mistral", "bert", "vit", "mamba", "clip")])
@pytest.mark.parametrize("training", [True, *further(False)])
def test_known_models(name: str, training: bool) -> None:
    entry = ZOO[name]
    config = copy.deepcopy(entry.model().config)
    deepen(config, 8)
    torch.manual_seed(0)
    model = type(entry.model())(config)
    batch = entry.batch(0)
    check(model, Microbatch(batch.args, batch.kwargs, batch.target), entry.loss, REPLACED[name], training)


@pytest.mark.parametrize("name", further("deepseek_v3", "qwen3_235b", "gpt_oss_120b"))
def test_full_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of 117 to 671 billion parameters on the meta device; each takes about a minute."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    large = importlib.import_module("large_models").LARGE[name]
    model = large.new(large.layers)
    run = partial(capture, model, large.loss, large.example(2048), torch.device("cpu"))
    assert difference(run().joint, run(copy_layers=False).joint) is None


def test_training_equals_eager() -> None:
    """Copies in a pipeline: losses and gradients of several steps are eager's, bit for bit."""
    model, twin = Model(), Model()
    split, debug = ["layers.1", "layers.4", "end"], graphpp.Debug(copy_layers=True)
    with internals.replaced_calls() as calls:
        pipe = graphpp.compile(model, F.mse_loss, split=split, schedule="1F1B", microbatches=3, debug=debug)
        pipe.step(X, target=X)
    assert len(calls) == LAYERS - 2
    model.zero_grad()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    for _ in range(3):
        loss = pipe.step(X, target=X).loss
        losses = []
        for part in X.split(1):
            losses.append(F.mse_loss(twin(part), part))
            (losses[-1] / 3).backward()
        assert torch.equal(loss, torch.stack(losses).mean())
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.grad is None if theirs.grad is None else torch.equal(mine.grad, theirs.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
