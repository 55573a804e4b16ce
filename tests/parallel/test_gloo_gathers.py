"""Functional all-gathers of tensors on the CPU, which graphpp gives kernels of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import graphpp  # noqa: F401 - registers the kernels
from tests.distributed import run_ranks

OPS = torch.ops._c10d_functional


def gathered(rank: int) -> list[torch.Tensor]:
    """Of every rank: rows of several shapes and dtypes, one of them not contiguous, gathered together and alone."""
    name = dist.group.WORLD.group_name
    parts = [torch.full((2, 3), rank + 1.5), torch.full((1, 2, 2), rank, dtype=torch.bfloat16), torch.arange(6).view(2, 3).t()]
    together = OPS.all_gather_into_tensor_coalesced.default(parts, 2, name)
    alone = [OPS.all_gather_into_tensor.default(each, 2, name) for each in parts]
    found = [OPS.wait_tensor.default(each) for each in (*together, *alone)]
    plain = []
    for each in parts:
        pieces = [torch.empty_like(each.contiguous()) for _ in range(2)]
        dist.all_gather(pieces, each.contiguous())
        plain.append(torch.cat(pieces))
    assert all(map(torch.equal, found, [*plain, *plain]))
    return found


def test_gathers_are_those_of_torch() -> None:
    first, second = run_ranks(gathered, 2)
    assert all(map(torch.equal, first, second))
    assert [each.dtype for each in first[:3]] == [torch.float32, torch.bfloat16, torch.int64]


@pytest.mark.parametrize("name", ["all_gather_into_tensor", "all_gather_into_tensor_coalesced"])
def test_the_kernels_are_graphpps(name: str) -> None:
    """Torch's own, for all devices, call the coalesced gather of the group."""
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{name}", "CPU")
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{name}", "CUDA")
