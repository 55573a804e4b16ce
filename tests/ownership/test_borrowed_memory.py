"""Memory that is lent for one call, and marks in memory that nobody has written."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graphpp.errors import GraphPPError
from graphpp.ownership.borrowed_memory import BorrowedMemory, poison, poisoned

CPU = torch.device("cpu")
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_memory_is_marked_until_it_is_written(dtype: torch.dtype) -> None:
    tensor = torch.empty(5, 3, dtype=dtype)
    poison(tensor)
    assert poisoned(tensor)
    tensor.copy_(torch.ones(5, 3))
    assert not poisoned(tensor)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype not in (torch.int16, torch.int8, torch.uint8)], ids=str)
def test_one_unwritten_element_is_found(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 2**20, dtype=dtype).t()
    poison(tensor)
    flat = torch.ones(3 * 2**20).view(tensor.shape)
    tensor[:-1] = flat[:-1].to(dtype)
    assert poisoned(tensor)
    tensor[-1] = flat[-1].to(dtype)
    assert not poisoned(tensor)


def test_a_tensor_has_memory_from_its_first_use_to_the_end_of_the_call() -> None:
    lent = BorrowedMemory(CPU)
    source = nn.Parameter(torch.empty(4, 3, device="meta").t(), requires_grad=False)
    source.tag = "kept"  # type: ignore[attr-defined]
    tensor = lent.like(source, "source")
    assert isinstance(tensor, nn.Parameter) and tensor.tag == "kept"  # type: ignore[attr-defined]
    assert tensor.stride() == source.stride() and not tensor.requires_grad and tensor.device == CPU
    storage = tensor.untyped_storage()
    with lent:
        assert tensor.shape == (3, 4) and storage.nbytes() == 0
        view = tensor[1:]
        with pytest.raises(GraphPPError, match="isnan takes values from source, which another rank holds"):
            view.isnan()
        assert storage.nbytes() == 48
        tensor.data.fill_(2)
        assert view.sum() == 16
        lent.give_back()
        assert storage.nbytes() == 0
        with pytest.raises(GraphPPError, match="sum takes values from source"):
            view.sum()  # an old view has memory again, without the values
        lent.give_back()


READS = {
    "reflected operator": lambda tensor: 1 - tensor,
    "operator": lambda tensor: tensor + 1,
    "comparison": lambda tensor: tensor > 0,
    "truth": lambda tensor: bool(tensor[0]),
    "number": lambda tensor: float(tensor[0]),
    "item": lambda tensor: tensor[0].item(),
    "index by a tensor": lambda tensor: tensor[torch.tensor([0])],
    "another's data": lambda tensor: setattr(torch.empty(2), "data", tensor),
    "argument of a change in place": lambda tensor: torch.empty(2).add_(tensor),
    "copy": lambda tensor: torch.empty(2).copy_(tensor),
    "clone": lambda tensor: tensor.clone(),
    "NumPy": lambda tensor: tensor.numpy(),
    "conversion": lambda tensor: tensor.double(),
    "deep copy": copy.deepcopy,
    "index by a list": lambda tensor: tensor[[0, 1]],
}


@pytest.mark.parametrize("name", READS)
def test_values_of_an_earlier_call_cannot_be_read(name: str) -> None:
    lent = BorrowedMemory(CPU)
    tensor = lent.like(torch.empty(2, device="meta"), "layer.weight")
    with lent:
        tensor.fill_(3)
        READS[name](tensor)
        lent.give_back()
        tensor.mul_(2)  # changes the tensor alone
        tensor[0] = 2.0
        tensor += 1
        lent.give_back()
        with pytest.raises(GraphPPError, match=r"takes values from layer\.weight"):
            READS[name](tensor)


def test_numbers_and_lists_are_read_with_memory() -> None:
    lent = BorrowedMemory(CPU)
    tensor = lent.like(torch.empty(2, device="meta"), "source")
    with lent:
        nn.init.ones_(tensor)
        assert tensor.tolist() == [1, 1] and tensor.numpy().sum() == 2
        assert torch.stack([tensor, tensor]).sum() == 4
