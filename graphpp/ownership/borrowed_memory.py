"""Memory for the tensors of other ranks, while code that initialises a model touches them.

Contract
--------
- `BorrowedMemory.like(tensor, fqn)` is a tensor without memory on a device. Inside the context its memory is made when a
  function of torch first touches it, and `give_back` frees the memory of all of them.
- The memory has no values at first. A function that would take values from there raises `GraphPPError` with the FQN, until a
  function has written the tensor. Views, and functions that change the tensor itself in place, take nothing from there.
- Values of some tensors are kept (`Kept`): `give_back` hands them over before the memory goes, and memory that is made anew
  gets them back, unless the function writes all of it. Taking values from such a tensor never raises.
- `poison` marks memory as unwritten: NaN in floating-point numbers, one rare value in integers of four and eight bytes, in
  booleans a byte that is neither True nor False. `poisoned` tells whether a mark is left. Shorter integers have no value to
  spare; their tensor counts as written once an operator has changed it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from graphpp._torch.pytree import tree_flatten
from graphpp._torch.tensor_subclass import FACTS
from graphpp.errors import GraphPPError
from graphpp.runtime.released import like, trim_after

_WRITES = {  # functions that write every element of their first argument, whatever the argument held
    *("zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_"),
    *("geometric_", "constant_", "ones_", "zeros_", "eye_", "dirac_", "trunc_normal_", "orthogonal_", "sparse_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_", "__setitem__"),
}
_VIEWS = {  # functions that take no value from their arguments: their result is the same memory, or new, or no tensor
    *("__get__", "__getitem__", "detach", "view", "view_as", "t", "transpose", "permute", "narrow", "select", "split", "chunk"),
    *("unbind", "unsqueeze", "squeeze", "expand", "unflatten", "movedim", "swapaxes", "untyped_storage", "requires_grad_"),
    *("new", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "empty_like", "zeros_like", "ones_like"),
    *("full_like", "rand_like", "randn_like", "_calculate_fan_in_and_fan_out", "storage_offset", "data_ptr"),
}
_OPERATORS = {f"__{name}__" for name in ("set", "setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow")}
_PIECE = 2**20  # elements that are looked at at once
_NO_BOOL = 0xAA  # a byte that is neither True nor False
_RARE = 1_234_567  # above the least integer: a value that no table of a model is likely to have


class Kept(Protocol):
    """Keeps values of tensors while these have no memory."""

    def __contains__(self, fqn: str) -> bool: ...

    def keep(self, fqn: str, whole: torch.Tensor) -> None:
        """Keep the values of a tensor."""

    def restore(self, fqn: str, whole: torch.Tensor) -> bool:
        """Copy kept values into a tensor; False: there are none."""


class BorrowedMemory(TorchFunctionMode):
    """A context in which tensors made by `like` have memory from their first use to the next `give_back`."""

    def __init__(self, device: torch.device, kept: Kept | None = None) -> None:
        super().__init__()
        self._device, self._kept = device, kept
        self._own: dict[torch.UntypedStorage, torch.Tensor] = {}  # the tensors whose values are kept
        self._lent: dict[torch.UntypedStorage, tuple[int, str]] = {}  # bytes, and FQN
        self._used: list[torch.UntypedStorage] = []
        self._written: set[torch.UntypedStorage] = set()

    def like(self, tensor: torch.Tensor, fqn: str) -> torch.Tensor:
        """A tensor with the class, shape, strides, dtype and attributes of `tensor`, without memory."""
        blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        storage = blank.untyped_storage()
        self._lent[storage] = storage.nbytes(), fqn
        storage.resize_(0)
        made = like(tensor, blank)
        if self._kept is not None and fqn in self._kept:
            self._own[storage] = made
        return made

    def give_back(self) -> None:
        """Free the memory of all tensors."""
        freed = sum(storage.nbytes() for storage in self._used)
        for storage in self._used:
            if self._kept is not None and storage in self._own:
                self._kept.keep(self._lent[storage][1], self._own[storage])
            if storage.resizable():  # not where a NumPy array shares the memory
                storage.resize_(0)
        self._used.clear()
        self._written.clear()
        if self._device.type == "cpu":
            trim_after(freed)

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, with memory for the tensors that it takes."""
        if function not in FACTS:
            name = getattr(function, "__name__", "")
            first = next(iter((*args, *(kwargs or {}).values())), None)
            in_place = name in _OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in _VIEWS)
            for leaf in tree_flatten((args, kwargs))[0]:
                if isinstance(leaf, torch.Tensor) and not leaf.is_meta and leaf.layout is torch.strided:
                    self._lend(leaf, name, itself=in_place and leaf is first, views=name in _VIEWS and not _picks(name, args))
        return function(*args, **(kwargs or {}))

    def _lend(self, tensor: torch.Tensor, function: str, *, itself: bool, views: bool) -> None:
        """Make the memory of a tensor that a function takes.

        `itself`: whether the function changes the tensor in place; `views`: whether it takes no values.
        """
        storage = tensor.untyped_storage()
        if storage not in self._lent:
            return
        size, fqn = self._lent[storage]
        if size and storage.nbytes() == 0:
            storage.resize_(size)
            self._used.append(storage)
            overwrites = itself and function in _WRITES and function != "__setitem__" and tensor.nbytes == size
            self._begin(storage, tensor.dtype, restores=not overwrites)
        if itself and function in _WRITES:
            self._written.add(storage)
        elif storage not in self._own and not itself and not views and storage not in self._written:
            raise GraphPPError(
                f"{function} takes values from {fqn}, which another rank holds and another call has written: tie the "
                "parameters, or write the tensor first in the same call"
            )


    def _begin(self, storage: torch.UntypedStorage, dtype: torch.dtype, *, restores: bool) -> None:
        """Write kept values or marks into new memory."""
        own = self._own.get(storage)
        if own is None:
            poison(torch.empty(0, dtype=dtype, device=self._device).set_(storage))
        elif not (restores and self._kept is not None and self._kept.restore(self._lent[storage][1], own)):
            poison(own)


def _picks(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a function is an index that copies elements: by a tensor, or by a list."""
    if name != "__getitem__":
        return False
    index = args[1] if isinstance(args[1], tuple) else args[1:]
    return any(isinstance(each, torch.Tensor | list) for each in index)


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
