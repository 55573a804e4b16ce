"""Linear layers that torchao converts to float8 train with eager's numbers, bit for bit, by torch._scaled_mm of the CPU."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import cases

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torchao.float8")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

WIDTH, TOKENS, WORDS, ROWS, MICROBATCHES, STEPS = 32, 8, 48, 8, 4, 2
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class Block(nn.Module):
    """A layer of a Llama: attention and a gated feed-forward network, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up, self.down = (nn.Linear(*x, bias=False) for x in ((WIDTH, 64), (WIDTH, 64), (64, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norms[0](x)
        q, k, v = (each(normed).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.norms[1](x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def converted(recipe: str | None, dtype: torch.dtype = torch.float32, **changes: Any) -> Llama:
    torch.manual_seed(0)
    model = Llama().to(dtype)
    if recipe is not None:
        config = replace(Float8LinearConfig.from_recipe_name(recipe), **changes)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda layer, fqn: fqn != "head")
    return model


def batch(number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    first, second = torch.randint(WORDS, (2, ROWS, TOKENS), generator=generator)
    return first, second


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.2, momentum=0.9)


Steps = list[dict[str, Tensor]]


def eager(model: nn.Module, replicas: int = 1, *, by_replica: bool = True) -> Steps:
    """The gradients of each step of a plain loop. `by_replica`: whether each replica's microbatches are added first."""
    optimizer, found = sgd(model.parameters()), Steps()
    for number in range(STEPS):
        batches = [[x.chunk(MICROBATCHES) for x in batch(100 * number + replica)] for replica in range(replicas)]
        parts = [[(each[0][at], each[1][at]) for at in range(MICROBATCHES)] for each in batches]
        outer = parts if by_replica else [list(each) for each in zip(*parts, strict=True)]
        sums: dict[str, Tensor] = {}
        for inner in outer:
            for tokens, target in inner:
                (loss(model(tokens), target) / MICROBATCHES).backward()
            for fqn, each in model.named_parameters():
                if each.grad is not None:
                    sums[fqn] = sums[fqn] + each.grad if fqn in sums else each.grad
            optimizer.zero_grad()
        for fqn, each in model.named_parameters():
            each.grad = sums[fqn] / replicas if fqn in sums else None
        found.append({fqn: each.grad.clone() for fqn, each in model.named_parameters() if each.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def trained(pipe: graphpp.Pipeline, replica: int = 0) -> Steps:
    found, optimizer = Steps(), None
    for number in range(STEPS):
        tokens, target = batch(100 * number + replica)
        pipe.step(tokens, target=target)
        optimizer = optimizer or sgd(pipe.parameters())
        found.append({n: whole_tensor(each.grad).clone() for n, each in pipe.named_parameters() if each.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def on_ranks(rank: int, recipe: str, sizes: Mapping[str, int], options: Mapping[str, Any]) -> Steps:
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    pipe = graphpp.compile(converted(recipe), loss, mesh=mesh, microbatches=MICROBATCHES, **options)
    return trained(pipe, rank if "dp_shard" in sizes else 0)


def check_equal(found: Steps, wanted: Steps) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.keys() == other.keys()
        assert not [fqn for fqn in one if not torch.equal(one[fqn], other[fqn])]


SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "1F1B": {"split": 2},
    "Interleaved1F1B": {"split": 4},
    "ZBVZeroBubble": {"split": 4},
    "DualPipeV": {"split": 4},
}


@pytest.mark.parametrize(
    ("recipe", "schedule", "memory"),
    cases(
        product(RECIPES, SCHEDULES, (None, "full")),
        ("tensorwise", "ZBVZeroBubble", "full"), ("rowwise", "1F1B", None), ("rowwise_with_gw_hp", "DualPipeV", None),
    ),
)  # fmt: skip
def test_two_ranks(recipe: str, schedule: str, memory: str | None) -> None:
    options = {"schedule": schedule, "memory": memory, **SCHEDULES[schedule]}
    parts = run_ranks(on_ranks, 2, recipe, {"pp": 2}, options)
    check_equal([{**one, **other} for one, other in zip(*parts, strict=True)], eager(converted(recipe)))


@pytest.mark.parametrize(
    ("recipe", "keep"),
    cases(product(RECIPES, (None, 0)), ("tensorwise", None)),
)
def test_shards(recipe: str, keep: int | None) -> None:
    """A scale is that of the whole weight, also where each rank has half of its rows."""
    parallel = {} if keep is None else {"parallel": graphpp.Parallel(keep=keep)}
    parts = run_ranks(on_ranks, 2, recipe, {"dp_shard": 2}, parallel)
    for part in parts:
        check_equal(part, eager(converted(recipe), replicas=2, by_replica=keep != 0))


class Adapted(nn.Module):
    """LoRA: a frozen layer, and the product of two small trained ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = (nn.Linear(*x, bias=False) for x in ((base.in_features, 4), (4, base.out_features)))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted() -> nn.Module:
    model = converted("rowwise").requires_grad_(False)
    for layer in model.layers:
        layer.q = Adapted(layer.q)
    return model


def with_checkpoints() -> nn.Module:
    model = converted("tensorwise", torch.bfloat16)
    for layer in model.layers:
        own = layer.forward
        layer.forward = lambda x, own=own: checkpoint(own, x, use_reentrant=False)
    return model


def of_odd_width() -> nn.Module:
    """The kernel of the CPU takes sizes that are no multiples of 16, as the padded and the emulated product do."""
    model = converted(None)
    for each in model.layers:
        each.gate, each.up, each.down = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
    return convert_to_float8_training(model, config=Float8LinearConfig(pad_inner_dim=True))


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "LoRA": adapted,
    "checkpoints": with_checkpoints,
    "odd width": of_odd_width,
    "emulated": lambda: converted("rowwise", torch.bfloat16, emulate=True),
}


@pytest.mark.parametrize("name", cases(MODELS, "LoRA", "checkpoints"))
def test_models(name: str) -> None:
    wanted = eager(seeded(MODELS[name]))
    options = graphpp.Debug(audit=1)
    check_equal(trained(graphpp.compile(seeded(MODELS[name]), loss, split=2, microbatches=MICROBATCHES, debug=options)), wanted)


def seeded(made: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return made()


@pytest.mark.parametrize("recipe", cases(RECIPES, "rowwise"))
def test_an_evaluation_and_names(recipe: str) -> None:
    model, (tokens, target) = converted(recipe), batch()
    found = graphpp.compile(model, loss, split=2, microbatches=MICROBATCHES).eval(tokens, target=target)
    with torch.no_grad():
        logits = torch.cat([model(each) for each in tokens.chunk(MICROBATCHES)])
    assert torch.equal(found.output, logits)
    assert list(model.state_dict()) == list(converted(None).state_dict())


def test_what_runs_when(tmp_path: Path) -> None:
    """Weights are scaled and cast once per step, by layer; a split backward leaves the products of weight gradients to W."""
    model = converted("tensorwise", torch.bfloat16)
    pipe = graphpp.compile(model, loss, split=2, microbatches=2, schedule="ZB1P", debug=str(tmp_path))
    tokens, target = batch()
    pipe.step(tokens, target=target)
    folder = tmp_path / "rank0" / "train" / "programs"
    texts = {each.stem.removeprefix("stage1_"): each.read_text() for each in folder.glob("stage1_*.py")}
    linear = 2 * 7  # layers of the stage
    called = "= _aten__scaled_mm_default(", "= _aten_max_default("
    counted = {phase: tuple(map(text.count, called)) for phase, text in texts.items()}
    assert {phase: counted[phase] for phase in ("forward", "input_grad", "weight_grad", "hoist")} == {
        "forward": (linear, linear),  # scales of the inputs
        "input_grad": (linear, linear),  # of the gradients of outputs
        "weight_grad": (linear, 2 * linear),  # of both
        "hoist": (0, 2 * linear),  # of the weights, for the forward and for the gradient of the input
    }


@pytest.mark.exhaustive  # 20 CPU seconds; the kernels that count are a GPU's
def test_inductor(tmp_path: Path) -> None:
    """Its sums are in another order; the scales of weights are found once per step, too."""
    options: dict[str, Any] = {"backend": "inductor", "debug": str(tmp_path)}
    found = trained(graphpp.compile(converted("tensorwise"), loss, split=2, microbatches=MICROBATCHES, **options))[0]
    for fqn, wanted in eager(converted("tensorwise"))[0].items():
        torch.testing.assert_close(found[fqn], wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))
    assert "_aten_max_default(" in (tmp_path / "rank0" / "train" / "programs" / "stage1_hoist.py").read_text()


def test_float8_gathers_are_refused() -> None:
    model, (tokens, target) = converted("tensorwise", enable_fsdp_float8_all_gather=True), batch()
    with pytest.raises(graphpp.CaptureError, match=r"layers\.0\.q\.weight is a .*enable_fsdp_float8_all_gather=False"):
        graphpp.compile(model, loss, split=2, microbatches=MICROBATCHES).step(tokens, target=target)
