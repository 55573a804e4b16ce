"""Models after `parallelize_module` train like eager on the same ranks, bit for bit, and like one process up to rounding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh
from tests.tensor_parallel import (
    CUTS,
    MICROBATCHES,
    assert_near,
    batch,
    compiled,
    decoder,
    loss,
    spread,
    train_alone,
    train_on_mesh,
)

TENSOR, PIPE = Mesh((2,), ("tp",)), Mesh((2, 2), ("pp", "tp"))
REPLICAS, SHARDS = Mesh((2, 2), ("dp_replicate", "tp")), Mesh((2, 2), ("dp_shard", "tp"))
TURNED, EVERYTHING = Mesh((2, 2), ("tp", "dp_shard")), Mesh((2, 2, 2), ("pp", "dp_shard", "tp"))


def gradients_beside_eager(rank: int, mesh: Mesh, sequence: bool, tied: bool, options: dict[str, Any]) -> list[str]:
    """The FQNs of this rank's parameters whose gradients have other bits than in eager on the same ranks."""
    torch.set_num_threads(1)
    made = mesh.made()
    eager = spread(decoder(tied=tied), made["tp"], sequence=sequence)
    pipe = compiled(made, copy.deepcopy(eager), **options)
    tokens, target = batch(7)
    pipe.step(tokens, target=target)
    for x, y in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        (loss(eager(x), y) / MICROBATCHES).backward()
    sums: dict[str, Tensor] = {}
    for fqn, parameter in eager.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        if isinstance(gradient, DTensor):  # a norm under sequence parallelism has partial gradients
            assert isinstance(parameter, DTensor)
            gradient = gradient.redistribute(placements=parameter.placements).to_local()
        sums[fqn] = gradient
    unlike = []
    for fqn, parameter in pipe.named_parameters():
        gradient, own = parameter.grad, dict(eager.named_parameters())[fqn]
        if isinstance(own, DTensor):
            assert isinstance(gradient, DTensor)
            assert gradient.placements == own.placements
            gradient = gradient.to_local()
        if not torch.equal(gradient, sums[fqn]):
            unlike.append(fqn)
    return unlike


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "sequence", "tied", "stages", "schedule"),
    [
        (TENSOR, True, False, 2, "1F1B"),
        *further(
            (PIPE, True, False, 4, "ZBVZeroBubble"),
            (TENSOR, False, False, 2, "1F1B"),
            (PIPE, False, False, 2, "GPipe"),
            (PIPE, True, False, 4, "Interleaved1F1B"),
            (PIPE, False, False, 4, "LoopedBFS"),
            (PIPE, True, False, 4, "DualPipeV"),
        ),
    ],
)
def test_gradients_have_eagers_bits(mesh: Mesh, sequence: bool, tied: bool, stages: int, schedule: str) -> None:
    options = {"split": CUTS[stages], "schedule": schedule}
    assert run_ranks(gradients_beside_eager, mesh.ranks, mesh, sequence, tied, options) == [[]] * mesh.ranks


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("mesh", "sequence", "tied", "options"),
    [
        (TENSOR, True, True, {}),
        *further(
            (PIPE, False, True, {"split": CUTS[2]}),
            (SHARDS, False, True, {"parallel": graphpp.Parallel(keep=0)}),
            (SHARDS, True, False, {}),
            (EVERYTHING, True, False, {"split": CUTS[4], "schedule": "Interleaved1F1B", "parallel": graphpp.Parallel(keep=1)}),
            (EVERYTHING, True, True, {"split": CUTS[4], "schedule": "ZBVZeroBubble", "parallel": graphpp.Parallel(keep=0)}),
            (REPLICAS, True, False, {}),
            (TURNED, False, True, {}),
            (Mesh((2, 1), ("dp_shard", "tp")), True, False, {}),
            (Mesh((2, 1), ("pp", "tp")), True, False, {"split": CUTS[2]}),
            (EVERYTHING, False, True, {"split": CUTS[2], "schedule": "1F1B"}),
            (PIPE, True, False, {"split": CUTS[4], "schedule": "DualPipeV", "backend": "inductor"}),
            (PIPE, True, False, {"split": CUTS[2], "schedule": "1F1B", "memory": "full"}),
        ),
    ],
)
def test_a_training_is_that_of_one_process(mesh: Mesh, sequence: bool, tied: bool, options: dict[str, Any]) -> None:
    expected = train_alone(mesh.replicas, {"tied": tied})
    for found in run_ranks(train_on_mesh, mesh.ranks, mesh, {"tied": tied}, sequence, options):
        assert_near(found, expected)


def test_dropout_of_whole_values_draws_what_one_process_draws() -> None:
    model = {"layers": 2, "dropout": 0.5}
    expected = train_alone(1, model)
    for found in run_ranks(train_on_mesh, 2, TENSOR, model, False, {}):
        torch.testing.assert_close(found.losses, expected.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.norms, expected.norms, rtol=1e-5, atol=1e-6)
