"""Gradient accumulation that is bit-equal to a plain loop over microbatches.

Contract
--------
- `param.grad` after the step is ((grad + g0) + g1) + .. in microbatch order, whatever order the schedule ran the
  backwards in: a gradient that comes early waits for its turn.
- The first gradient becomes `param.grad` itself when it is contiguous and nobody else holds its memory, as autograd does;
  else a contiguous copy.
- A gradient may come as the factors of a product (`products.py`).
- `FusedAccumulator` is the fast one: what comes is added at once, in the order in which the schedule makes it, and products
  are written into the sum. It differs from the plain loop by how sums are rounded, and from itself not at all.
- Sums may be kept in a wider dtype than the gradients have: float32 for parameters in bfloat16, say.
- A parameter that several stages use collects one partial sum per stage; `TiedReduction` adds them in stage order, once, at the
  end of the step, to the same bits on every rank that holds the parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch

from graphpp.runtime.gradients.gemm_accumulation import Products, TorchProducts, Within, gradient_of


class Accumulator:
    """Collects the gradients of one stage's parameters over the microbatches of a step."""

    def __init__(self, fqns: Iterable[str], shared: Collection[str] = ()) -> None:
        self.fqns = tuple(fqns)
        self.products: Products = TorchProducts()
        self._shared = frozenset(shared)
        self.start({})

    def start(self, initial: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Begin a step; `initial` holds what is there already, `dtypes` in what to add up (else as they come), per FQN."""
        self._dtypes = dtypes or {}
        self.sums = {fqn: total.to(dtype=self._dtypes.get(fqn)) for fqn, total in initial.items()}
        self._next: dict[str, int] = defaultdict(int)
        self._early: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)

    def take(self, microbatch: int, fqn: str, gradient: torch.Tensor) -> None:
        """Take one microbatch's gradient of a parameter; gradients count in microbatch order."""
        turn = self._next[fqn]
        if microbatch != turn:
            self._early[fqn][microbatch] = gradient
            return
        self._add(fqn, gradient)
        early = self._early[fqn]
        while (turn := turn + 1) in early:
            self._add(fqn, early.pop(turn))
        self._next[fqn] = turn

    def product(self, microbatch: int, fqn: str, a: torch.Tensor, b: torch.Tensor, within: Within | None = None) -> None:
        """Take a gradient that is a product of matrices."""
        self.take(microbatch, fqn, gradient_of(self.products, a, b, within))

    def _add(self, fqn: str, gradient: torch.Tensor) -> None:
        total = self.sums.get(fqn)
        if total is not None:
            total.add_(gradient)
            return
        copied = fqn in self._shared or _is_part(gradient)
        own = gradient.clone(memory_format=torch.contiguous_format) if copied else gradient
        self.sums[fqn] = own.to(dtype=self._dtypes.get(fqn))


class FusedAccumulator(Accumulator):
    """Adds gradients as they come; products are added by whoever multiplies."""

    def take(self, microbatch: int, fqn: str, gradient: torch.Tensor) -> None:
        """Add a gradient."""
        self._add(fqn, gradient)

    def product(self, microbatch: int, fqn: str, a: torch.Tensor, b: torch.Tensor, within: Within | None = None) -> None:
        """Write a product into the sum; the first one is the sum, and one of a narrower dtype is added to it."""
        total = self.sums.get(fqn)
        if total is None or total.dtype != a.dtype or not total.is_contiguous():
            self._add(fqn, gradient_of(self.products, a, b, within))
        else:
            self.products.add(total if within is None else total.as_strided(*within[1:], total.storage_offset()), a, b)


class Taker:
    """What the program of one microbatch hands its gradients to; `fqns` by index of the result."""

    __slots__ = ("_accumulator", "_fqns", "_microbatch")

    def __init__(self, accumulator: Accumulator, microbatch: int, fqns: Mapping[int, str]) -> None:
        self._accumulator, self._microbatch, self._fqns = accumulator, microbatch, fqns

    def __call__(self, index: int, value: torch.Tensor) -> None:
        """Take a gradient."""
        self._accumulator.take(self._microbatch, self._fqns[index], value)

    def product(self, index: int, a: torch.Tensor, b: torch.Tensor, within: Within | None = None) -> None:
        """Take a gradient that is a product of matrices."""
        self._accumulator.product(self._microbatch, self._fqns[index], a, b, within)


def dtype_of_sum(parameter: torch.Tensor, widened: torch.dtype | None) -> torch.dtype:
    """In what the gradients of a parameter add up: at least `widened`, at least what its `grad` is to have."""
    dtype: torch.dtype = parameter.grad_dtype or parameter.dtype
    return torch.promote_types(dtype, widened) if widened is not None else dtype


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a view of a larger or differently ordered memory."""
    return tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size() or not tensor.is_contiguous()
