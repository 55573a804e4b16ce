"""Sums over ranks have the bits of a plain loop over the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpp.parallel.ordered_sums import everywhere, scattered
from tests.distributed import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


def summand(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, dtype=dtype, generator=torch.Generator().manual_seed(7 * rank + size)) * 10.0 ** (rank % 3)


def loop(ranks: int, size: int, dtype: torch.dtype) -> Tensor:
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    total = summand(0, size, dtype).to(wide)
    for rank in range(1, ranks):
        total += summand(rank, size, dtype)
    return total.to(dtype)


def sums(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in DTYPES:
        for size in (0, 1, 5, 1000, 20_001):
            own, expected = summand(rank, size, dtype), loop(ranks, size, dtype)
            assert torch.equal(everywhere(own.clone(), group)()[0], expected)
            first = size // 3  # the ranks get parts of other lengths; the last one none
            lengths = [first, size - first, *[0] * (ranks - 2)]
            start = sum(lengths[:rank])
            wanted = expected[start : start + lengths[rank]]
            assert torch.equal(scattered([own], [lengths], group)()[0], wanted)
            many = scattered([own, own * 2, own[:first]], [lengths, lengths, [first, *[0] * (ranks - 1)]], group)()
            assert torch.equal(many[0], wanted)
            assert torch.equal(many[1], 2 * wanted)
            assert len(many[2]) == (0 if rank else first)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_of_a_loop_over_the_ranks(ranks: int) -> None:
    run_ranks(sums, ranks, ranks)
