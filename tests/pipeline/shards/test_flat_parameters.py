"""A few plain tensors in place of all parameters of a rank: the same training, faster steps of the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh, batch, compiled, example, odd
from tests.special_models import CUTS

SHARD3, PIPE = Mesh((3,), ("dp_shard",)), Mesh((2, 2), ("pp", "dp_shard"))


def pipeline(mesh: Mesh) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    model = odd(tied=True)
    model.unused.requires_grad_(False)  # a parameter without a gradient has gradient 0 in a flat one, and decays
    return compiled(mesh.made(), model, split=CUTS[2 if "pp" in mesh.names else 1], example=example())


def optimizer_of(pipe: graphpp.Pipeline, flat: bool, kind: Any) -> torch.optim.Optimizer:
    matrices = [p for p in pipe.parameters() if p.dim() > 1 and p.requires_grad]
    vectors = [p for p in pipe.parameters() if p.dim() < 2 and p.requires_grad]
    if flat:
        dims = {fqn: p.dim() for fqn, p in pipe.named_parameters()}
        both = pipe.flat_parameters()
        matrices = [p for fqns, p in both if dims[fqns[0]] > 1]
        vectors = [p for fqns, p in both if dims[fqns[0]] < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return kind([group for group in groups if group["params"]], lr=0.01)


def steps(pipe: graphpp.Pipeline, optimizer: torch.optim.Optimizer, replica: int, numbers: range) -> list[Tensor]:
    norms = []
    for number in numbers:
        tokens, target = batch(10 * number + replica)
        pipe.step(tokens, target=target)
        norms.append(pipe.clip_grad_norm_(1.0))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def values(pipe: graphpp.Pipeline) -> dict[str, Tensor]:
    return {fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()}


def both_ways(rank: int, mesh: Mesh, kind: Any) -> None:
    found = []
    for flat in (False, True):
        pipe = pipeline(mesh)
        optimizer = optimizer_of(pipe, flat, kind)
        norms = steps(pipe, optimizer, mesh.replica(rank), range(3))
        found.append((torch.stack(norms), values(pipe)))
    assert torch.equal(found[0][0], found[1][0])
    for fqn, value in found[0][1].items():
        torch.testing.assert_close(found[1][1][fqn], value, rtol=1e-6, atol=1e-7, msg=fqn)  # foreach and vector tails round


@pytest.mark.parametrize(("mesh", "kind"), [(PIPE, torch.optim.AdamW), *further((SHARD3, torch.optim.SGD))])
def test_flat_parameters_train_as_all_parameters_do(mesh: Mesh, kind: Any) -> None:
    run_ranks(both_ways, mesh.ranks, mesh, kind)


def views(rank: int) -> None:
    """Values and gradients are one memory, however gradients are cleared, and whenever somebody asks first."""
    pipe = pipeline(SHARD3)
    tokens, target = batch(rank)
    pipe.step(tokens, target=target)
    before = {fqn: whole_tensor(p.grad).clone() for fqn, p in pipe.named_parameters() if p.grad is not None}
    flat = pipe.flat_parameters()
    assert all(parameter is other for (_, parameter), (_, other) in zip(flat, pipe.flat_parameters(), strict=True))
    assert sorted(fqn for fqns, _ in flat for fqn in fqns) == sorted(before)

    def same(factor: float) -> None:
        for fqn, parameter in pipe.named_parameters():
            if fqn in before:
                assert torch.equal(whole_tensor(parameter.grad), before[fqn] * factor), fqn

    same(1)
    with torch.no_grad():
        for _, parameter in flat:
            parameter.grad.mul_(2)
    same(2)
    for _, parameter in flat:
        parameter.grad = None  # as an optimizer of flat parameters clears them
    pipe.step(tokens, target=target)
    same(1)
    for parameter in pipe.parameters():
        parameter.grad = None  # as an optimizer of all parameters does
    pipe.step(tokens, target=target)
    same(1)
    for set_to_none in (True, False):
        pipe.zero_grad(set_to_none=set_to_none)
        pipe.step(tokens, target=target)
        same(1)
    weights = values(pipe)
    with torch.no_grad():
        for _, parameter in flat:
            parameter.mul_(2)
    assert all(torch.equal(value, 2 * weights[fqn]) for fqn, value in values(pipe).items() if fqn in before)


def test_flat_gradients_are_the_gradients() -> None:
    run_ranks(views, 3)


def adamw(groups: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW with an `eps` above the rounding of gradients that are zero but for their rounding, as of a bias before a norm."""
    return torch.optim.AdamW(groups, lr=lr, eps=1e-3)


def saved(rank: int, mesh: Mesh, flat: bool, folder: Path) -> dict[str, Tensor]:
    pipe = pipeline(mesh)
    optimizer = optimizer_of(pipe, flat, adamw)
    steps(pipe, optimizer, 0, range(2))
    pipe.checkpoint(optimizer).async_save(folder).wait()
    steps(pipe, optimizer, 0, range(2, 4))
    return values(pipe)


def resumed(rank: int, mesh: Mesh, flat: bool, folder: Path) -> dict[str, Tensor]:
    pipe = pipeline(mesh)
    optimizer = optimizer_of(pipe, flat, adamw)
    pipe.checkpoint(optimizer).load(folder)
    steps(pipe, optimizer, 0, range(2, 4))
    return values(pipe)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("before", "after"), [((PIPE, True), (SHARD3, False)), *further(((SHARD3, False), (PIPE, True)))]
)
def test_checkpoints_of_flat_parameters_fit_others(before: Any, after: Any, tmp_path: Path) -> None:
    known: dict[str, Tensor] = {}
    for found in run_ranks(saved, before[0].ranks, *before, tmp_path / "run"):
        known |= found
    for found in run_ranks(resumed, after[0].ranks, *after, tmp_path / "run"):
        for fqn, value in found.items():
            torch.testing.assert_close(value, known[fqn], rtol=1e-4, atol=1e-5, msg=fqn)
