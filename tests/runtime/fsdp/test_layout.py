"""Flat shards: rows as torch's `Shard(0)` has them, whole parameters without a copy."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import graphpp
from graphpp.runtime.fsdp.gather_parameters import FlatShard, Layout
from tests.distributed import run_ranks

SHAPES = [(10, 4), (7, 3), (4,), (1, 5), (33, 8), (2, 3, 5), (0, 3), (3, 0), (5, 6, 2, 2)]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), min_size=1, max_size=6), st.integers(1, 5))
def test_regions_lie_one_behind_the_other_and_have_room_for_every_row(shapes: list[list[int]], ranks: int) -> None:
    tensors = {f"p{at}": torch.empty(shape) for at, shape in enumerate(shapes)}
    layout, end = Layout.of(tensors, ranks, 4), 0
    for fqn, region in layout.regions.items():
        assert region.start >= end
        assert region.start * 4 % 64 == 0
        end = region.start + region.elements
        rows = [row for rank in range(ranks) for row in region.rows_of(rank)]
        assert rows == list(range(tensors[fqn].shape[0]))
        assert sum(region.lengths()) == tensors[fqn].numel()
        assert max(region.lengths()) <= region.elements
    assert end <= layout.elements


def values() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {f"p{at}": torch.randn(shape) for at, shape in enumerate(SHAPES)}
    found["channels last"] = torch.randn(5, 3, 2, 2).to(memory_format=torch.channels_last)
    return found


def gathered(rank: int, ranks: int) -> None:
    mesh, tensors = init_device_mesh("cpu", (ranks,)), values()
    flat = FlatShard(tensors, mesh.get_group(), torch.device("cpu"), frees=True)
    for fqn, tensor in tensors.items():
        flat.take(fqn, tensor)
        expected = distribute_tensor(tensor, mesh, [Shard(0)]).to_local()
        assert torch.equal(flat.local(fqn), expected)
        if expected.numel():
            assert flat.local(fqn).untyped_storage().data_ptr() == flat.values.untyped_storage().data_ptr()
    views = {fqn: flat.whole(fqn) for fqn in tensors}  # they stay valid while their memory comes and goes
    for _ in range(2):
        flat.unshard()
        flat.unshard()  # by a second stage
        flat.ready()
        flat.reshard()
        for fqn, tensor in tensors.items():
            assert torch.equal(views[fqn], tensor)
            assert views[fqn].stride() == tensor.stride()
        flat.reshard()
        assert views["p0"].untyped_storage().nbytes() == 0
        flat.values.mul_(2)
        tensors = {fqn: tensor * 2 for fqn, tensor in tensors.items()}


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_whole_parameters_are_views_of_what_the_ranks_send(ranks: int) -> None:
    run_ranks(gathered, ranks, ranks)


def test_a_parameter_whose_rows_are_mixed_in_memory_is_refused() -> None:
    with pytest.raises(graphpp.GraphPPError, match=r"turned of shape \[3, 4\] has strides \[1, 3\]"):
        Layout.of({"turned": nn.Parameter(torch.randn(4, 3).t())}, 2, 4)
