"""Models whose experts `ep` spreads train like eager on the same ranks, bit for bit, and like one process up to rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.expert_parallel import CUTS, mixture, train_alone, train_on_mesh
from tests.sharding import Mesh
from tests.tensor_parallel import MICROBATCHES, Trained, assert_near, batch, compiled, loss, train

ALONE, PIPE, TURNED = Mesh((2,), ("ep",)), Mesh((2, 2), ("pp", "ep")), Mesh((2, 2), ("ep", "pp"))
REPLICAS, SHARDS = Mesh((2, 2), ("dp_replicate", "ep")), Mesh((2, 2), ("dp_shard", "ep"))
FLAT, SHARDS_LAST = Mesh((1, 4), ("dp_shard", "ep")), Mesh((2, 2), ("ep", "dp_shard"))
SHARDED_PIPE = Mesh((2, 1, 2), ("pp", "dp_shard", "ep"))


def gradients_beside_eager(rank: int, mesh: Mesh, options: dict[str, Any]) -> list[str]:
    """The FQNs of this rank's parameters whose gradients have other bits than in eager on the same ranks.

    Eager adds up the gradients of microbatches, then those of the ranks that have the parameter, in their order, and divides by
    the number of ranks.
    """
    torch.set_num_threads(1)
    made = mesh.made()
    eager = mixture(made["ep"])
    pipe = compiled(made, mixture(made["ep"]), **options)
    tokens, target = batch(mesh.replica(rank))
    pipe.step(tokens, target=target)
    if pipe.plan.memory is not None and "dp_shard" not in mesh.names:  # whole experts: fewer ranks have each one
        copies = mesh.sizes[mesh.names.index("dp_replicate")] if "dp_replicate" in mesh.names else 1
        assert {each.averaged_over for each in pipe.plan.memory.state if each.makers} == {None, copies}
    sums: dict[str, Tensor] = {}
    for x, y in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        eager.zero_grad()
        (loss(eager(x), y) / MICROBATCHES).backward()
        for fqn, parameter in eager.named_parameters():
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            sums[fqn] = gradient.clone() if fqn not in sums else sums[fqn] + gradient
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (mesh.replica(rank), made.get_local_rank("ep"), sums))
    of_replicas = {replica: (place, found) for replica, place, found in ranks}  # in the order of the ranks
    unlike = []
    for fqn, parameter in pipe.named_parameters():
        spread = isinstance(dict(eager.named_parameters())[fqn], DTensor)
        same = [found for place, found in of_replicas.values() if not spread or place == made.get_local_rank("ep")]
        total = same[0][fqn].clone()
        for each in same[1:]:
            total += each[fqn]
        total /= len(of_replicas)
        found = whole_tensor(parameter.grad)
        own = found.chunk(made["ep"].size())[made.get_local_rank("ep")] if spread else found
        if not torch.equal(own, total):
            unlike.append(fqn)
    return unlike


@pytest.mark.parametrize(
    ("mesh", "stages", "schedule"),
    [
        (PIPE, 4, "Interleaved1F1B"),
        *further(
            (SHARDS, 1, "auto"),
            (SHARDED_PIPE, 4, "ZBVZeroBubble"),
            (ALONE, 2, "1F1B"),
            (PIPE, 2, "1F1B"),
            (TURNED, 2, "GPipe"),
            (PIPE, 4, "DualPipeV"),
            (PIPE, 4, "LoopedBFS"),
            (REPLICAS, 1, "auto"),
            (FLAT, 1, "auto"),
            (SHARDS_LAST, 1, "auto"),
        ),
    ],
)
def test_gradients_have_eagers_bits(mesh: Mesh, stages: int, schedule: str) -> None:
    options = {"split": CUTS[stages], "schedule": schedule}
    assert run_ranks(gradients_beside_eager, mesh.ranks, mesh, options) == [[]] * mesh.ranks


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("mesh", "options", "flat"),
    [
        (SHARDS, {"split": CUTS[2], "parallel": graphpp.Parallel(keep=0)}, False),
        *further(
            (ALONE, {"parallel": graphpp.Parallel(sum_order="any")}, False),
            (REPLICAS, {}, False),
            (SHARDED_PIPE, {"split": CUTS[4], "schedule": "LoopedBFS", "parallel": graphpp.Parallel(keep=1)}, True),
            (REPLICAS, {"split": CUTS[2], "parallel": graphpp.Parallel(sum_order="any")}, False),
            (SHARDS, {"split": CUTS[2], "parallel": graphpp.Parallel(sum_order="any")}, False),
            (FLAT, {"split": CUTS[2], "parallel": graphpp.Parallel(keep=0, sum_order="any")}, True),
            (PIPE, {"split": CUTS[2], "backend": "inductor"}, False),
            (FLAT, {"split": CUTS[2], "parallel": graphpp.Parallel(keep=0)}, False),
            (SHARDED_PIPE, {"split": CUTS[4], "schedule": "ZBVZeroBubble", "parallel": graphpp.Parallel(keep=0)}, False),
            (PIPE, {"split": CUTS[4], "schedule": "DualPipeV"}, False),
            (SHARDS, {"split": CUTS[2], "memory": "full"}, False),
            (SHARDS_LAST, {"split": CUTS[2]}, True),
            (Mesh((2, 2, 2), ("dp_replicate", "dp_shard", "ep")), {"split": CUTS[2]}, False),
            (Mesh((2, 2, 2), ("pp", "dp_shard", "ep")), {"split": CUTS[4], "schedule": "Interleaved1F1B"}, False),
        ),
    ],
)
def test_a_training_is_that_of_one_process(mesh: Mesh, options: dict[str, Any], flat: bool) -> None:
    expected = train_alone(mesh.replicas)
    found = run_ranks(train_on_mesh, mesh.ranks, mesh, options, flat)
    assert all(each.norms == found[0].norms for each in found)
    for each in found:
        assert_near(each, expected)


def train_with_layers(rank: int, mesh: Mesh, options: dict[str, Any]) -> Trained:
    """A training in which `tp` spreads the head too; ranks along `tp` have equal batches."""
    torch.set_num_threads(1)
    made = mesh.made()
    model = mixture(made["ep"])
    parallelize_module(model, made["tp"], {"head": ColwiseParallel(output_layouts=Replicate())})
    return train(compiled(made, model, **options), [mesh.replica(rank)])


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (Mesh((2, 2), ("ep", "tp")), {}),
        *further(
            (Mesh((2, 2, 2), ("pp", "ep", "tp")), {"split": CUTS[4], "schedule": "Interleaved1F1B"}),
            (Mesh((2, 2, 2), ("dp_shard", "ep", "tp")), {"split": CUTS[2]}),
        ),
    ],
)
def test_experts_and_shared_layers_train_together(mesh: Mesh, options: dict[str, Any]) -> None:
    expected = train_alone(mesh.replicas)
    for found in run_ranks(train_with_layers, mesh.ranks, mesh, options):
        assert_near(found, expected)
