"""Optimizers of torch over stages and shards; Muon, which updates whole matrices, beside AdamW in groups chosen by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further

MICROBATCHES, STEPS = 4, 3
STAGES = {"split": ["head"], "schedule": "1F1B", "microbatches": MICROBATCHES}
SHARDS = {"mesh": "dp_shard", "microbatches": MICROBATCHES // 2}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(2)))
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.embed(x))).flatten(0, 1)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target.flatten())


TOKENS = torch.randint(16, (8, 6), generator=torch.Generator().manual_seed(1))


Optimizers = Callable[[Iterable[tuple[str, Tensor]]], list[torch.optim.Optimizer]]


def of_all(name: str, named: Iterable[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """An optimizer of torch for all parameters; "fused " in front of its name makes it fused."""
    kind, fused = getattr(torch.optim, name.removeprefix("fused ")), name.startswith("fused ")
    return [kind([each for _, each in named], lr=1e-3, **({"fused": True} if fused else {}))]


def muon_and_adamw(named: Iterable[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, if the rank has any, and AdamW for the others."""
    parameters = dict(named)
    matrices = {name for name, each in parameters.items() if name.startswith("layers.") and each.dim() == 2}
    others = [each for name, each in parameters.items() if name not in matrices]
    muon = [torch.optim.Muon([parameters[name] for name in sorted(matrices)], lr=0.02)] if matrices else []
    return [*muon, torch.optim.AdamW(others, lr=1e-2)]


def update(used: Iterable[torch.optim.Optimizer], wide: bool) -> None:
    """One step of each optimizer. `wide`: Muon computes in float32 in place of bfloat16."""
    with pytest.MonkeyPatch.context() as patch:
        if wide:
            patch.setattr(Tensor, "bfloat16", lambda self: self)  # of torch before 2.15
            patch.setattr(torch, "bfloat16", torch.float32)
        for each in used:
            each.step()
            each.zero_grad()


def plain(wide: bool, make: Optimizers = muon_and_adamw) -> dict[str, Tensor]:
    model = Net()
    used = make(model.named_parameters())
    for _ in range(STEPS):
        for rows in TOKENS.chunk(MICROBATCHES):
            (loss(model(rows), rows) / MICROBATCHES).backward()
        update(used, wide)
    return {name: each.detach() for name, each in model.named_parameters()}


def trained(rank: int, options: dict[str, Any], wide: bool, make: Optimizers = muon_and_adamw) -> dict[str, Tensor]:
    mesh = options.get("mesh")
    given = {**options, **({"mesh": init_device_mesh("cpu", (2,), mesh_dim_names=(mesh,))} if mesh else {})}
    pipe = graphpp.compile(Net(), loss, example=graphpp.Microbatch((TOKENS[:2],), target=TOKENS[:2]), **given)
    used = make(pipe.named_parameters())
    for _ in range(STEPS):
        pipe.step(TOKENS, target=TOKENS)
        update(used, wide)
    whole = ((name, each.full_tensor() if mesh == "dp_shard" else each) for name, each in pipe.named_parameters())  # type: ignore[attr-defined]
    return {name: each.detach().clone() for name, each in whole}


def test_ranks_with_groups_of_their_own_train_as_one_process() -> None:
    """The rank of the last stage has no matrix for Muon."""
    first, second = run_ranks(trained, 2, STAGES, False)
    expected = plain(wide=False)
    assert set(second) == {"head.weight", "head.bias"} and (first | second).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in (first | second).items())


def test_shards_of_a_matrix_are_updated_as_the_whole_matrix() -> None:
    """Muon's products run in bfloat16, where a sum over shards rounds otherwise; in float32 they differ by its rounding."""
    expected = plain(wide=True)
    found = run_ranks(trained, 2, SHARDS, True)[0]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", further("AdamW", "fused AdamW", "NAdam", "Adagrad", "RMSprop", "Adafactor"))
def test_other_optimizers_train_as_one_process(name: str) -> None:
    """Over stages bit-equal; over shards up to the order of the sum over replicas. Torch refuses Adafactor over shards."""
    make = partial(of_all, name)
    expected = plain(False, make)
    first, second = run_ranks(trained, 2, STAGES, False, make)
    assert all(torch.equal(value, expected[fqn]) for fqn, value in (first | second).items())
    with pytest.raises(RuntimeError, match="placement changes") if name == "Adafactor" else nullcontext():
        torch.testing.assert_close(run_ranks(trained, 2, SHARDS, False, make)[0], expected, rtol=0.0, atol=1e-6)
