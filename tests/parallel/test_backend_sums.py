"""Sums that the backend of a group adds are those of a loop over the ranks, where no sum is rounded."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpp.parallel.backend_sums import everywhere, scattered
from tests.distributed import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64]


def summand(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    """Small integers, whose sums have the same bits in every order and dtype."""
    return torch.randint(-9, 9, (size,), generator=torch.Generator().manual_seed(7 * rank + size)).to(dtype)


def sums(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for dtype in DTYPES:
        for size in (1, 5, 1000, 20_001):
            own = summand(rank, size, dtype)
            expected = sum(summand(each, size, dtype) for each in range(ranks))
            assert isinstance(expected, Tensor)
            assert torch.equal(everywhere(own.clone(), group)()[0], expected)
            even = own.repeat(ranks)
            assert torch.equal(scattered([even], [[size] * ranks], group)()[0], expected)
            first = size // 3  # the ranks get parts of other lengths; the last one none
            lengths = [first, size - first, *[0] * (ranks - 2)]
            start = sum(lengths[:rank])
            wanted = expected[start : start + lengths[rank]]
            assert torch.equal(scattered([own], [lengths], group)()[0], wanted)
            narrow = [first, *[0] * (ranks - 1)]
            many = scattered([own, own * 2, own[:first]], [lengths, lengths, narrow], group, [torch.complex128] * 3)()
            assert torch.equal(many[0], wanted.to(torch.complex128))
            assert torch.equal(many[1], 2 * wanted.to(torch.complex128))
            assert len(many[2]) == (0 if rank else first)


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_those_of_a_loop_over_the_ranks(ranks: int) -> None:
    run_ranks(sums, ranks, ranks)
