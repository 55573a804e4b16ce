"""Gradient accumulation over the microbatches of a step, bit-equal to a plain loop over them.

- The running program calls the task's `MicrobatchSink` as soon as no other operation reads the gradient; the sink answers None,
  so the gradient's memory is free while the program goes on. A gradient that is also another result of its program (for
  instance a tensor sent to the previous stage) is returned, and `Task.file` (`runtime/task.py`) passes it to the same sink.
- After the step `param.grad` is ((grad + g0) + g1) + .. in microbatch order, whatever order the schedule ran the backwards in:
  an early gradient is kept until its turn.
- The first gradient becomes the sum itself, as in autograd, if it is contiguous and no other tensor shares its memory; else the
  sum is a contiguous copy.
- `FusedAccumulator` is faster: it adds each gradient at once, in the schedule's order, and multiplies products into the sum
  (`gemm_accumulation.py`). Its sums differ from the plain loop's by rounding; two equal steps give equal bits.
- Sums may have a wider dtype than the gradients, such as float32 for bfloat16 parameters.
- A parameter that several stages use has one partial sum per stage; `TiedReduction` (`tied.py`) adds them after the step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from graphpp.runtime.gradients.gemm_accumulation import MatmulKernel, MatmulLayout, gradient_of


class Accumulator:
    """Sums the gradients of one stage's parameters over the microbatches of a step, in microbatch order."""

    def __init__(
        self,
        fqns: Iterable[str],
        shared: Collection[str] = (),
        kernel: MatmulKernel | None = None,
        is_overwritten: Callable[[torch.Tensor], bool] | None = None,
    ) -> None:
        """`shared`: the FQNs whose gradients may share memory with other tensors; `kernel`: multiplies deferred products;
        `is_overwritten`: whether a gradient's memory is overwritten later in the step."""
        self.fqns, self._is_overwritten = tuple(fqns), is_overwritten or (lambda gradient: False)
        self._kernel = kernel or MatmulKernel()
        self._shared = frozenset(shared)
        self.silent: frozenset[int] = frozenset()  # the microbatches of this step whose gradients count as zeros
        self.start({})

    def start(self, initial: Mapping[str, torch.Tensor], dtypes: Mapping[str, torch.dtype] | None = None) -> None:
        """Begin a step. By FQN: `initial` has the sums so far, `dtypes` the dtypes of the sums (else the gradients' own)."""
        self._dtypes = dtypes or {}
        self.sums = {fqn: _in_dtype(total, self._dtypes.get(fqn)) for fqn, total in initial.items()}
        self._next = dict.fromkeys(self.fqns, 0)
        self._early: dict[str, dict[int, torch.Tensor]] = {}

    def restart(self, initial: Mapping[str, torch.Tensor]) -> None:
        """Begin the step anew with other sums so far, of the same dtypes."""
        self.start(initial, self._dtypes)

    def take(self) -> dict[str, torch.Tensor]:
        """Remove and return the sums so far, contiguous, in the order of first gradients; later gradients start new sums."""
        taken, self.sums = self.sums, {}
        return taken

    def add(self, microbatch: int, fqn: str, gradient: torch.Tensor) -> None:
        """Add one microbatch's gradient of a parameter, once the gradients of all earlier microbatches are added."""
        turn = self._next[fqn]
        if microbatch != turn:
            self._early.setdefault(fqn, {})[microbatch] = gradient
            return
        self._add_now(fqn, gradient)
        self._next[fqn] = turn + 1
        if fqn in self._early:
            self._add_early(fqn)

    def _add_early(self, fqn: str) -> None:
        early = self._early[fqn]
        while self._next[fqn] in early:
            self._add_now(fqn, early.pop(self._next[fqn]))
            self._next[fqn] += 1
        if not early:
            del self._early[fqn]

    def add_matmul(
        self, microbatch: int, fqn: str, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None
    ) -> None:
        self.add(microbatch, fqn, gradient_of(self._kernel, a, b, layout))

    def _add_now(self, fqn: str, gradient: torch.Tensor) -> None:
        total = self.sums.get(fqn)
        if total is not None:
            total.add_(gradient)
            return
        copied = fqn in self._shared or _is_view(gradient) or self._is_overwritten(gradient)
        own = gradient.clone(memory_format=torch.contiguous_format) if copied else gradient
        self.sums[fqn] = _in_dtype(own, self._dtypes.get(fqn))


class FusedAccumulator(Accumulator):
    """Adds each gradient when it comes, in the schedule's order, and multiplies products into the sum."""

    def add(self, microbatch: int, fqn: str, gradient: torch.Tensor) -> None:
        self._add_now(fqn, gradient)

    def add_matmul(
        self, microbatch: int, fqn: str, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None
    ) -> None:
        """Multiply `a @ b` into the sum; without a contiguous sum of its dtype, make the product and add it."""
        total = self.sums.get(fqn)
        if total is None or total.dtype != a.dtype or not total.is_contiguous():
            self._add_now(fqn, gradient_of(self._kernel, a, b, layout))
        else:
            into = total if layout is None else total.as_strided(*layout[1:], total.storage_offset())
            self._kernel.multiply_add(into, a, b)


class MicrobatchSink:
    """The `GradientSink` of one program run: adds to an accumulator; `fqns` has the parameter of each gradient by index."""

    __slots__ = ("_accumulator", "_fqns", "_microbatch")

    def __init__(self, accumulator: Accumulator, microbatch: int, fqns: Mapping[int, str]) -> None:
        self._accumulator, self._microbatch, self._fqns = accumulator, microbatch, fqns

    def __call__(self, index: int, value: torch.Tensor) -> None:
        silent = self._microbatch in self._accumulator.silent
        self._accumulator.add(self._microbatch, self._fqns[index], torch.zeros_like(value) if silent else value)

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        if self._microbatch in self._accumulator.silent:
            a, b = torch.zeros_like(a), torch.zeros_like(b)
        self._accumulator.add_matmul(self._microbatch, self._fqns[index], a, b, layout)


def dtype_of_sum(parameter: torch.Tensor, widened: torch.dtype | None) -> torch.dtype:
    """The dtype in which a parameter's gradients are summed: that of `parameter.grad`, widened to at least `widened`."""
    dtype: torch.dtype = parameter.grad_dtype or parameter.dtype
    return torch.promote_types(dtype, widened) if widened is not None else dtype


def _in_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype=dtype)


def _is_view(tensor: torch.Tensor) -> bool:
    """Whether the tensor covers only a part of its memory, is not contiguous, or is a lazy conjugate or negative."""
    covers = tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.is_contiguous()
    return not covers or tensor.is_conj() or tensor.is_neg()
