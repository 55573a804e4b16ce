"""LoRA on frozen weights that torchao quantised trains with eager's numbers, bit for bit (QLoRA)."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import cases

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

WIDTH, MICROBATCHES, ROWS = 64, 4, 2


class Adapted(nn.Module):
    """A frozen layer, and the product of two small trained matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def int8(model: nn.Module) -> None:
    quantize_(model, Int8WeightOnlyConfig())


def int8_activations(model: nn.Module) -> None:
    quantize_(model, Int8DynamicActivationInt8WeightConfig())


def int4(model: nn.Module) -> None:
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)))


def nf4(model: nn.Module) -> None:
    for layer in (each for each in model.modules() if isinstance(each, nn.Linear)):
        layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 32), requires_grad=False)


QUANTISED: dict[str, Callable[[nn.Module], None]] = {
    "int8": int8,
    "int8 activations": int8_activations,
    "int4": int4,
    "nf4": nf4,
}


def adapted(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).requires_grad_(False)
    QUANTISED[kind](model)
    for block in model:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def test_linear_layers_of_bitsandbytes(tmp_path: Path) -> None:
    """They keep their state in Python objects, and write in place into results of constants."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def bitsandbytes_nf4(model: nn.Module) -> None:
        for block in model:
            for name, layer in (("up", block.up), ("down", block.down)):
                made = bitsandbytes.nn.Linear4bit(
                    layer.in_features, layer.out_features, quant_type="nf4", compute_dtype=torch.float32
                )
                made.load_state_dict(layer.state_dict())
                setattr(block, name, made.to("cpu").requires_grad_(False))

    with patch.dict(QUANTISED, {"bitsandbytes nf4": bitsandbytes_nf4}):
        test_one_process("bitsandbytes nf4", tmp_path)
        packed = pytest.raises(graphpp.CaptureError, match="set its support_avx512bf16_for_cpu to False")
        for packs, expected in ((True, packed), (False, nullcontext())):
            model, (x, target) = adapted("bitsandbytes nf4"), batch()
            for layer in (each for each in model.modules() if isinstance(each, bitsandbytes.nn.Linear4bit)):
                layer.support_avx512bf16_for_cpu = packs
            with expected:
                graphpp.compile(model, F.mse_loss, split=["2"], microbatches=MICROBATCHES).eval(x, target=target)


def batch() -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).unbind()
    return x, target


def eager(kind: str) -> dict[str, Tensor]:
    """The loss and the gradients by FQN, microbatch by microbatch."""
    model, (x, target) = adapted(kind), batch()
    losses = []
    for rows, wanted in zip(x.split(ROWS), target.split(ROWS), strict=True):
        loss = F.mse_loss(model(rows), wanted) / MICROBATCHES
        loss.backward()
        losses.append(loss.detach())
    gradients = {fqn: each.grad for fqn, each in model.named_parameters() if each.grad is not None}
    return {"loss": torch.stack(losses).sum(), **gradients}


def stepped(rank: int, kind: str, schedule: str, split: list[str], folder: str) -> dict[str, Tensor]:
    """The loss and this rank's gradients of a step; trains on, and resumes from a checkpoint."""
    model, (x, target) = adapted(kind), batch()
    pipe = graphpp.compile(
        model, F.mse_loss, split=split, schedule=schedule, microbatches=MICROBATCHES, debug=graphpp.Debug(audit=1)
    )
    loss = pipe.step(x, target=target).loss
    own = {id(each) for each in pipe.parameters()}
    found = {fqn: each.grad.clone() for fqn, each in model.named_parameters() if id(each) in own and each.grad is not None}
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    optimizer.step()
    pipe.checkpoint(optimizer).save(folder)
    after = pipe.step(x, target=target).loss
    pipe.checkpoint(optimizer).load(folder)
    again = pipe.step(x, target=target).loss
    assert loss is not None and after is not None and again is not None
    assert after < loss and torch.equal(after, again)
    return {"loss": loss, **found}


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("kind", QUANTISED)
def test_one_process(kind: str, tmp_path: Path) -> None:
    wanted, found = eager(kind), stepped(0, kind, "GPipe", ["2"], str(tmp_path / "checkpoint"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)


SCHEDULES = {"1F1B": ["2"], "ZBVZeroBubble": ["1", "2", "3"]}


@pytest.mark.parametrize(
    ("kind", "schedule"), cases(product(QUANTISED, SCHEDULES), ("int8", "1F1B"), ("nf4", "ZBVZeroBubble"))
)
def test_two_ranks(kind: str, schedule: str, tmp_path: Path) -> None:
    wanted = eager(kind)
    parts = run_ranks(stepped, 2, kind, schedule, SCHEDULES[schedule], str(tmp_path / "checkpoint"))
    found = {**parts[0], **parts[1]}
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_quantised_weight_that_trains_is_refused() -> None:
    model = adapted("int8")
    model[1].up.base.weight.requires_grad_(True)
    with pytest.raises(graphpp.CaptureError, match=r"the parameter 1.up.base.weight is a \w+, .*requires_grad_\(False\)"):
        graphpp.compile(model, F.mse_loss, split=1).step(*batch()[:1], target=batch()[1])
