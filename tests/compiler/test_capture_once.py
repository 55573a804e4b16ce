"""One rank captures and the others are given its graph; ranks that differ capture for themselves."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import graphpp
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further

ROOT = Path(__file__).parents[2]
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Layers that read a number, a tensor in an attribute, and a tensor that the forward itself makes."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale, self.shift = scale, torch.linspace(0, 1, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) * self.scale + self.shift) + torch.tensor([0.5, 0.25, 0.125, 0.0625])
        return x


def counted(model: nn.Module, steps: int = 2) -> tuple[int, list[float], graphpp.Pipeline]:
    """How often this rank captured in some steps, the losses, and the pipeline."""
    with internals.captures() as made:
        pipe = graphpp.compile(model, F.mse_loss, split=2, schedule="1F1B", microbatches=2)
        losses = [float(pipe.step(X, target=X).loss) for _ in range(steps)]
    return len(made), losses, pipe


def first_alone(rank: int) -> tuple[int, list[float]]:
    model = Model()
    captures, losses, pipe = counted(model)
    model.shift.add_(1)  # every rank's own tensor is read in each step
    losses.append(float(pipe.step(X, target=X).loss))
    pipe.eval(X)
    return captures, losses


def test_the_first_rank_captures_for_all_and_each_reads_its_own_tensors() -> None:
    (one, losses), (other, others) = run_ranks(first_alone, 2)
    assert (one, other) == (1, 0)
    assert losses == others
    model = Model()
    plain = []
    for _ in range(3):
        plain.append(float(torch.stack([F.mse_loss(model(part), part) for part in X.split(3)]).mean().detach()))
        if len(plain) == 2:
            model.shift.add_(1)
    assert losses == pytest.approx(plain, rel=1e-6)


class Asking(Model):
    """Asks for a variable of the environment, which ranks may have set differently."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(os.environ.get("GRAPHPP_TEST_SCALE", "1"))


def by_itself(rank: int, kind: type[nn.Module]) -> tuple[int, list[float]]:
    captures, losses, _ = counted(kind())
    return captures, losses


def test_ranks_that_may_differ_capture_for_themselves() -> None:
    found = run_ranks(by_itself, 2, Asking)
    assert found[0] == found[1]
    assert found[0][0] == 1


def other_number(rank: int) -> str:
    with pytest.raises(graphpp.MismatchError) as error:
        counted(Model(scale=2.0 + rank))
    return str(error.value)


def test_a_rank_with_another_number_is_refused() -> None:
    for message in run_ranks(other_number, 2):
        assert "differs in the compiled programs" in message


class Raising:
    """An object whose attributes cannot be read on rank 1."""

    def __getattribute__(self, name: str) -> Any:
        if name == "__dict__" and dist.get_rank() == 1:
            raise RuntimeError("not here")
        return super().__getattribute__(name)


class WithRaising(Model):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Raising()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * isinstance(self.odd, Raising)


class Point(NamedTuple):
    x: Tensor
    factor: int


class Pointed(Model):
    """An evaluation returns a class that torch's pytree does not list by name."""

    def forward(self, x: Tensor) -> Any:
        x = super().forward(x)
        return x if self.training else Point(x, 3)


@functools.cache
def expanded() -> Tensor:
    return torch.ones(1, 4).expand(3, 4)


class Expanded(Model):
    def __init__(self) -> None:
        super().__init__()
        expanded()  # before a trace, in which the cache would keep a fake tensor

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * expanded()


def evaluated(rank: int, kind: type[nn.Module]) -> tuple[list[float], str]:
    _, losses, pipe = counted(kind())
    output = pipe.eval(X).output
    return losses, type(output).__name__


@pytest.mark.parametrize("kind", [Pointed, *further(Model, WithRaising, Expanded)])
def test_ranks_run_also_if_a_graph_cannot_be_shared(kind: type[nn.Module]) -> None:
    found = run_ranks(evaluated, 2, kind)
    torch.manual_seed(0)
    pipe = graphpp.compile(kind(), F.mse_loss, split=2, schedule="GPipe", microbatches=2)
    losses = [float(pipe.step(X, target=X).loss) for _ in range(2)]
    assert [each[0] for each in found] == [losses, losses]
    assert {each[1] for each in found if each[1] != "NoneType"} == {type(pipe.eval(X).output).__name__}


def other_activation(rank: int) -> str:
    model = Model()
    loss = F.mse_loss if rank == 0 else F.l1_loss
    with pytest.raises(graphpp.MismatchError) as error:
        graphpp.compile(model, loss, split=2, schedule="1F1B", microbatches=2).step(X, target=X)
    return str(error.value)


def test_a_rank_with_another_loss_is_refused() -> None:
    for message in run_ranks(other_activation, 2):
        assert "differs in the code of the model or the loss" in message


class Failing(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


def fails(rank: int) -> str:
    with pytest.raises(graphpp.GraphPPError) as error:
        counted(Failing())
    return f"{type(error.value).__name__}: {error.value}"


def test_a_capture_that_fails_is_raised_on_all_ranks() -> None:
    first, other = run_ranks(fails, 2)
    assert first.startswith("CaptureError") and "test_capture_once.py" in first
    assert other.startswith("MismatchError") and "rank 0: CaptureError" in other


IMPORTS = """
import sys
import torch, torch.distributed as dist
from torch import nn
import graphpp

rank, ranks, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
"""
SETS = """
class Sets(nn.Module):
    def __init__(self):
        super().__init__()
        self.kinds = {f"kind{number}" for number in range(8)}
        self.layers = nn.ModuleDict({kind: nn.Linear(4, 4) for kind in sorted(self.kinds)})
        self.ends = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        masks = {kind: self.layers[kind](x) for kind in self.kinds}
        x = sum(masks[kind] for kind in sorted(masks))
        for end in self.ends:
            x = end(x)
        return x

def made():
    split = [f"ends.{stage}" for stage in range(ranks - 1)]
    return Sets(), nn.functional.mse_loss, split, graphpp.Microbatch((torch.ones(8, 4),), target=torch.ones(8, 4))
"""
GEMMA = """
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

def made():  # the forward of Gemma 3 iterates the set of its layers' kinds of attention
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    kinds = ["sliding_attention", "full_attention"] * 2
    model = Gemma3ForCausalLM(Gemma3TextConfig(**small, num_hidden_layers=4, layer_types=kinds, use_cache=False))
    ids = torch.arange(32).reshape(4, 8)
    return model, None, ranks, graphpp.Microbatch(kwargs={"input_ids": ids, "labels": ids})
"""
STEP = """
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", rank=rank, world_size=ranks, store=dist.FileStore(store, ranks))
model, loss, split, batch = made()
pipe = graphpp.compile(model, loss, split=split, schedule="1F1B", microbatches=4)
print(float(pipe.step(*batch.args, target=batch.target, **batch.kwargs).loss))
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("ranks", "model", "starts"), [(2, SETS, 1), *further((2, SETS, 6), (4, SETS, 6), (2, GEMMA, 6), (4, GEMMA, 6))]
)
def test_ranks_with_other_hash_seeds_get_one_graph(ranks: int, model: str, starts: int, tmp_path: Path) -> None:
    (tmp_path / "step.py").write_text(IMPORTS + model + STEP)
    for start in range(starts):
        seeds = [start * ranks + rank + 1 for rank in range(ranks)]
        store = tmp_path / f"store{start}"
        running = [
            subprocess.Popen(
                [sys.executable, str(tmp_path / "step.py"), str(rank), str(ranks), str(store)],
                env={**os.environ, "PYTHONHASHSEED": str(seeds[rank]), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        answers = [each.communicate(timeout=600) for each in running]
        assert [each.returncode for each in running] == [0] * ranks, json.dumps(answers, indent=1)
        assert len({out for out, _ in answers}) == 1
