"""Sums that travel together stand in one memory, and move into it once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphpp.parallel.sums import merged

LARGE = 2**21  # elements of float32 that fill a bundle


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


def test_a_tensor_alone_and_a_large_one_keep_their_memory() -> None:
    tensors: dict[str, Tensor] = {"large": torch.zeros(LARGE), "b": torch.ones(2, dtype=torch.float64), "a": torch.ones(3)}
    places = {name: each.data_ptr() for name, each in tensors.items()}
    found = list(merged(tensors, list(tensors)))
    assert [each.data_ptr() for each in found] == [places[name] for name in tensors]
    assert [len(each) for each in found] == [LARGE, 2, 3]
    assert list(merged(tensors, [])) == []
