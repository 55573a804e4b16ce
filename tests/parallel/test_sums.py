"""Sums over ranks are those of a loop over the ranks; sums that travel together stand in one memory, and move into it once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from graphpp.parallel import backend_sums, ordered_sums
from graphpp.parallel.sums import merged
from tests.distributed import run_ranks


def test_the_tensors_of_a_bundle_move_into_one_memory_and_stay_there() -> None:
    tensors = {name: torch.randn(shape) for name, shape in {"a": (3, 2), "b": (0,), "c": (), "d": (7,), "e": (2, 2)}.items()}
    before = {name: each.clone() for name, each in tensors.items()}
    (flat,) = merged(tensors, ["d", "a", "b", "c"])
    assert torch.equal(flat, torch.cat([before[name].view(-1) for name in "dabc"]))
    assert all(torch.equal(tensors[name], before[name]) and tensors[name].shape == before[name].shape for name in before)
    flat.mul_(2)
    assert all(torch.equal(tensors[name], 2 * before[name]) for name in "dabc")
    assert torch.equal(tensors["e"], before["e"])
    kept = dict(tensors)
    (again,) = merged(tensors, ["d", "a", "b", "c"])
    assert again.data_ptr() == flat.data_ptr() and all(tensors[name] is kept[name] for name in tensors)
    (other,) = merged(tensors, ["a", "d"])
    assert other.data_ptr() != flat.data_ptr() and torch.equal(other, torch.cat([tensors["a"].view(-1), tensors["d"]]))


@pytest.mark.parametrize(
    "given",
    [
        {"a": torch.arange(24.0).view(3, 8)[:, :4]},
        {"a": torch.arange(12.0).view(3, 4).t()},
        {"a": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last), "b": torch.ones(2)},
        {"a": torch.arange(16.0).view(2, 8)[:, :4], "b": torch.arange(16.0)[8:]},
        {"a": torch.view_as_complex(torch.arange(8.0).view(2, 2, 2)).conj()},
        {"a": torch.view_as_complex(torch.arange(8.0).view(2, 2, 2)).conj().imag, "b": torch.ones(3)},
    ],
)
def test_tensors_of_any_strides_move(given: dict[str, Tensor]) -> None:
    tensors = dict(given)
    (flat,) = merged(tensors, list(tensors))
    assert torch.equal(flat, torch.cat([each.reshape(-1) for each in given.values()]))
    assert not flat.is_conj() and not flat.is_neg() and all(each.is_contiguous() for each in tensors.values())
    assert all(torch.equal(tensors[name], given[name]) for name in given)
    flat.zero_()
    assert all(each.any() for each in given.values())


def summand(rank: int, size: int, dtype: torch.dtype, *, exact: bool) -> Tensor:
    """`exact`: small integers, whose sums have the same bits in every order and dtype."""
    draw = torch.Generator().manual_seed(7 * rank + size)
    if exact:
        return torch.randint(-9, 9, (size,), generator=draw).to(dtype)
    return torch.randn(size, dtype=dtype, generator=draw) * 10.0 ** (rank % 3)


def loop(ranks: int, size: int, dtype: torch.dtype, *, exact: bool) -> Tensor:
    total = summand(0, size, dtype, exact=exact).to(torch.float32 if dtype is torch.bfloat16 else dtype)
    for rank in range(1, ranks):
        total += summand(rank, size, dtype, exact=exact)
    return total.to(dtype)


def sums(rank: int, ranks: int, exact: bool) -> None:
    group, order = dist.group.WORLD, backend_sums if exact else ordered_sums
    assert group is not None
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64):
        for size in (1, 5, 1000, 20_001):
            own, expected = summand(rank, size, dtype, exact=exact), loop(ranks, size, dtype, exact=exact)
            assert torch.equal(order.everywhere(own.clone(), group)()[0], expected)
            first = size // 3  # the ranks get parts of other lengths; the last one none
            lengths = [first, size - first, *[0] * (ranks - 2)]
            start = sum(lengths[:rank])
            wanted = expected[start : start + lengths[rank]]
            assert torch.equal(order.scattered([own], [lengths], group)()[0], wanted)
            narrow = [first, *[0] * (ranks - 1)]
            wide = [torch.complex128] * 3 if exact else None
            many = order.scattered([own, own * 2, own[:first]], [lengths, lengths, narrow], group, wide)()
            assert torch.equal(many[0], wanted.to(many[0].dtype)) and torch.equal(many[1], 2 * wanted.to(many[1].dtype))
            assert len(many[2]) == (0 if rank else first)


@pytest.mark.parametrize(("ranks", "exact"), [(2, False), (3, False), (4, False), (2, True), (3, True)])
def test_sums_are_those_of_a_loop_over_the_ranks(ranks: int, exact: bool) -> None:
    run_ranks(sums, ranks, ranks, exact)
