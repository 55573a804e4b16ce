"""Memory for the tensors of other ranks, while code that initialises a model touches them.

Contract
--------
- `BorrowedMemory.like(tensor)` is a tensor without memory on a device. Inside the context its memory is made when a function of
  torch first touches it, and `give_back` frees the memory of all of them.
- `poison` marks memory as unwritten: NaN in floating-point numbers, one rare value in integers of four and eight bytes, in
  booleans a byte that is neither True nor False. `poisoned` tells whether a mark is left. Shorter integers have no value to
  spare; their tensor counts as written once an operator has changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graphpp._torch.pytree import tree_flatten
from graphpp._torch.tensor_subclass import FACTS
from graphpp.runtime.released import like

_PIECE = 2**20  # elements that are looked at at once
_NO_BOOL = 0xAA  # a byte that is neither True nor False
_RARE = 1_234_567  # above the least integer: a value that no table of a model is likely to have


class BorrowedMemory(TorchFunctionMode):
    """A context in which tensors made by `like` have memory from their first use to the next `give_back`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._bytes: dict[torch.UntypedStorage, int] = {}
        self._used: list[torch.UntypedStorage] = []

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor with the class, shape, strides, dtype and attributes of `tensor`, without memory."""
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        storage = blank.untyped_storage()
        self._bytes[storage] = storage.nbytes()
        storage.resize_(0)
        return like(tensor, blank)

    def give_back(self) -> None:
        """Free the memory of all tensors."""
        for storage in self._used:
            storage.resize_(0)
        self._used.clear()

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, with memory for the tensors that it takes."""
        if function not in FACTS:
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.layout is torch.strided:
                    self._lend(leaf)
        return function(*args, **(kwargs or {}))

    def _lend(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 and self._bytes.get(storage):
            storage.resize_(self._bytes[storage])
            self._used.append(storage)
            poison(torch.empty(0, dtype=tensor.dtype, device=self._device).set_(storage))


def poison(tensor: torch.Tensor) -> None:
    """Mark all elements of a tensor as unwritten."""
    with torch.no_grad():
        if tensor.dtype is torch.bool:
            tensor.view(torch.uint8).fill_(_NO_BOOL)
        elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            tensor.fill_(torch.nan)
        else:
            tensor.fill_(0 if _is_short(tensor) else torch.iinfo(tensor.dtype).min + _RARE)


def poisoned(tensor: torch.Tensor) -> bool:
    """Whether an element is unwritten since `poison`."""
    if _is_short(tensor):
        return tensor.numel() > 0 and tensor._version <= 1
    flat = tensor.detach().flatten()
    return any(bool(_poison_in(piece)) for piece in flat.split(_PIECE))


def _poison_in(piece: torch.Tensor) -> torch.Tensor:
    if piece.dtype is torch.bool:
        return (piece.view(torch.uint8) == _NO_BOOL).any()
    if piece.dtype.is_floating_point or piece.dtype.is_complex:
        return (piece.float() if piece.itemsize == 1 else piece).isnan().any()
    return (piece == torch.iinfo(piece.dtype).min + _RARE).any()


def _is_short(tensor: torch.Tensor) -> bool:
    """Whether a tensor has integers of one or two bytes."""
    dtype = tensor.dtype
    return tensor.itemsize <= 2 and not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool
