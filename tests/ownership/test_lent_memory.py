"""Memory that is lent for one call, and marks in memory that nobody has written."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from graphpp.errors import GraphPPError
from graphpp.ownership.lent_memory import LentMemory
from graphpp.ownership.unwritten import poison, poisoned

CPU = torch.device("cpu")
SHORT = (torch.int16, torch.int8, torch.uint8)
DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64),
    *(torch.int64, torch.int32, torch.bool, *SHORT),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_unwritten_element_is_found(dtype: torch.dtype) -> None:
    tensor = torch.empty(3, 2**20, dtype=dtype).t()
    poison(tensor)
    assert poisoned(tensor)
    ones = torch.ones(3 * 2**20).view(tensor.shape).to(dtype)
    if dtype not in SHORT:
        tensor[:-1] = ones[:-1]
        assert poisoned(tensor)
    tensor[-1] = ones[-1]
    assert not poisoned(tensor)


def test_a_tensor_has_memory_from_its_first_use_to_the_end_of_the_call() -> None:
    lent = LentMemory(CPU)
    source = nn.Parameter(torch.empty(4, 3, device="meta").t(), requires_grad=False)
    source.tag = "kept"  # type: ignore[attr-defined]
    tensor = lent.like(source, "source")
    assert isinstance(tensor, nn.Parameter) and tensor.tag == "kept"  # type: ignore[attr-defined]
    assert tensor.stride() == source.stride() and not tensor.requires_grad and tensor.device == CPU
    storage = tensor.untyped_storage()
    with lent, torch.no_grad():
        assert tensor.shape == (3, 4) and storage.nbytes() == 0
        view = tensor[1:]
        with pytest.raises(GraphPPError, match="takes values from source, which another rank holds"):
            view.isnan()
        assert storage.nbytes() == 48
        tensor.data.fill_(2)
        assert view.sum() == 16 and tensor.tolist()[0] == [2] * 4
        lent.give_back()
        assert storage.nbytes() == 0
        with pytest.raises(GraphPPError, match="sum takes values from source"):
            view.sum()  # an old view has memory again, without the values
        lent.give_back()


READS = {
    "reflected operator": lambda tensor: 1 - tensor,
    "truth": lambda tensor: bool(tensor[0]),
    "item": lambda tensor: tensor[0].item(),
    "index by a tensor": lambda tensor: tensor[torch.tensor([0])],
    "argument of a change in place": lambda tensor: torch.empty(2).add_(tensor),
    "copy": lambda tensor: torch.empty(2).copy_(tensor),
    "conversion": lambda tensor: tensor.double()[1:].sum(),
    "copy of a conversion": lambda tensor: torch.ones(2).copy_(tensor.bfloat16().clone()),
}


@pytest.mark.parametrize("name", READS)
def test_values_of_an_earlier_call_cannot_be_read(name: str) -> None:
    lent = LentMemory(CPU)
    tensor = lent.like(torch.empty(2, device="meta"), "layer.weight")
    with lent:
        tensor.fill_(3)
        READS[name](tensor)
        lent.give_back()
        tensor.mul_(2)  # changes the tensor alone
        tensor += 1
        with pytest.raises(GraphPPError, match=r"takes values from layer\.weight"):
            READS[name](tensor)


def test_a_part_that_is_filled_can_be_read_and_no_other() -> None:
    lent = LentMemory(CPU)
    tensor = lent.like(torch.empty(2, device="meta"), "layer.weight")
    with lent:
        tensor[0].fill_(3)
        assert tensor[0] == 3
        with pytest.raises(GraphPPError, match=r"takes values from layer\.weight"):
            tensor.sum()
        tensor[1].fill_(4)
        assert tensor.sum() == 7


def test_a_copy_may_be_filled_and_written_back() -> None:
    lent = LentMemory(CPU)
    tensor = lent.like(torch.empty(2, dtype=torch.bfloat16, device="meta"), "layer.weight")
    with lent:
        copy = tensor.float()
        nn.init.trunc_normal_(copy, std=0.02)
        assert tensor.copy_(copy).float().abs().sum() > 0
        lent.give_back()
        with pytest.raises(GraphPPError, match=r"takes values from layer\.weight, .* this call has not written"):
            tensor.float().sum()
