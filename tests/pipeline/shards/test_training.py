"""Sharded parameters train like whole ones: the bits of a loop over the replicas, under every schedule."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import graphpp
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh, Trained, example, train_alone, train_on_mesh
from tests.special_models import CUTS

SHARD2, SHARD3, SHARD4 = (Mesh((ranks,), ("dp_shard",)) for ranks in (2, 3, 4))
PIPE, TURNED = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("dp_shard", "pp"))
HYBRID = Mesh((2, 2), ("dp_replicate", "dp_shard"))


def options(stages: int, schedule: str, keep: int | None) -> dict[str, Any]:
    return {"split": CUTS[stages], "schedule": schedule, "parallel": graphpp.Parallel(keep=keep)}


def numbers(found: Trained) -> dict[str, Tensor | None]:
    """Everything that a training gave, by name."""
    by_step = {f"gradient of {fqn} in step {step}": g for step, grads in enumerate(found.grads) for fqn, g in grads.items()}
    lists = {"losses": torch.stack(found.losses)} | ({"norms": torch.stack(found.norms)} if found.norms else {})
    return by_step | found.params | lists


def differing(found: Trained, expected: Trained) -> list[str]:
    """The names of all numbers that are not bit-equal."""
    known = numbers(expected)
    return [name for name, value in numbers(found).items() if not _same(value, known[name])]


def _same(own: Tensor | None, other: Tensor | None) -> bool:
    return own is other if own is None or other is None else torch.equal(own, other)


def assert_close(found: Trained, expected: Trained) -> None:
    known = numbers(expected)
    for name, value in numbers(found).items():
        other = known[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert (value - other).abs().max() <= 1e-6 * max(1.0, float(other.abs().max())), name


@pytest.mark.nccl
@pytest.mark.first_cases(1)
@pytest.mark.parametrize(
    ("mesh", "stages", "schedule", "keep"),
    [
        (SHARD3, 2, "LoopedBFS", 1),
        (TURNED, 4, "Interleaved1F1B", None),
        *further(
            (SHARD2, 1, "auto", None),
            (PIPE, 4, "LoopedBFS", 1),
            (SHARD4, 1, "auto", None),
            (PIPE, 2, "GPipe", None),
            (PIPE, 2, "1F1B", None),
            (PIPE, 4, "ZBVZeroBubble", None),
            (PIPE, 4, "DualPipeV", None),
            (PIPE, 4, "InterleavedZeroBubble", None),
        ),
    ],
)
def test_gradients_have_the_bits_of_a_loop_over_the_replicas(
    mesh: Mesh, stages: int, schedule: str, keep: int | None
) -> None:
    """Each stage is put away once, after its last backward, so no sum over the microbatches is cut."""
    given = options(stages, schedule, keep) | ({} if mesh is SHARD3 else {"example": example()})
    expected = train_alone(mesh.replicas)
    for rank, found in enumerate(run_ranks(train_on_mesh, mesh.ranks, mesh, given)):
        assert differing(found, expected[mesh.replica(rank)]) == []


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("mesh", "stages", "schedule", "keep", "tied"),
    [
        (SHARD2, 4, "Interleaved1F1B", 2, False),
        *further(
            (HYBRID, 1, "auto", None, True),
            (PIPE, 4, "Interleaved1F1B", 1, True),
            (PIPE, 4, "ZBVZeroBubble", 1, True),
            (PIPE, 4, "DualPipeV", 2, True),
            (TURNED, 4, "InterleavedZeroBubble", 1, False),
            (Mesh((2, 2), ("dp_shard", "cp")), 2, "GPipe", None, False),
        ),
    ],
)
def test_gradients_and_norms_are_those_of_a_loop_but_for_rounding(
    mesh: Mesh, stages: int, schedule: str, keep: int | None, tied: bool
) -> None:
    """Sums over replicas, microbatches and stages are added in another order here."""
    expected = train_alone(mesh.replicas, tied, 0.5)
    ranks = run_ranks(train_on_mesh, mesh.ranks, mesh, options(stages, schedule, keep), tied, 0.5)
    for rank, found in enumerate(ranks):
        assert_close(found, expected[mesh.replica(rank)])
        assert torch.equal(torch.stack(found.norms), torch.stack(ranks[0].norms))


@pytest.mark.exhaustive
@pytest.mark.parametrize("norm", [0.5])
def test_schedules_and_kept_stages_change_no_bit(norm: float) -> None:
    """Where each stage is reduced once; norms and clipping included."""
    cases = [(2, "1F1B", None), (4, "Interleaved1F1B", None), (4, "LoopedBFS", 1), (4, "ZBVZeroBubble", None)]
    first, *others = [run_ranks(train_on_mesh, 4, PIPE, options(*case), False, norm) for case in cases]
    by_fqn = first[0].params | first[2].params
    for case, found in zip(cases[1:], others, strict=True):
        for rank, each in enumerate(found):
            assert torch.equal(torch.stack(each.norms), torch.stack(first[rank].norms)), case
            assert all(torch.equal(value, by_fqn[fqn]) for fqn, value in each.params.items()), case


@pytest.mark.nccl
@pytest.mark.parametrize("mesh", [Mesh((3,), ("dp_replicate",)), *further((Mesh((4,), ("dp_replicate",)),))])
def test_whole_parameters_have_the_bits_of_the_loop_too(mesh: Mesh) -> None:
    expected = train_alone(mesh.replicas)
    given = options(2, "LoopedBFS", None) | {"example": example()}
    for rank, found in enumerate(run_ranks(train_on_mesh, mesh.ranks, mesh, given)):
        assert differing(found, expected[rank]) == []


@pytest.mark.nccl
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "keep"),
    [
        (SHARD3, 0),
        *further((Mesh((2, 3), ("dp_replicate", "dp_shard")), 1), (Mesh((3,), ("dp_replicate",)), None)),
        *further((PIPE, 1), (Mesh((2, 2), ("pp", "dp_replicate")), None)),
    ],
)
def test_sums_in_the_order_of_the_backend_are_those_of_a_loop_but_for_rounding(mesh: Mesh, keep: int | None) -> None:
    expected = train_alone(mesh.replicas, True, 0.5)
    given = options(4, "LoopedBFS", keep) | {"parallel": graphpp.Parallel(keep=keep, sum_order="any")}
    for rank, found in enumerate(run_ranks(train_on_mesh, mesh.ranks, mesh, given, True, 0.5)):
        assert_close(found, expected[mesh.replica(rank)])
