"""The dtypes in which sharded parameters compute and their gradients travel, if they differ from the parameters' own.

- A rank's rows of a parameter, of its gradient and of its optimizer states keep the parameter's dtype. Gathering casts the
  rows; programs read the whole parameter in `param_dtype`, and make its gradient in this dtype.
- The sums over the microbatches are rounded to `reduce_dtype` once, before they are sent. The receiver adds them in float32 or
  wider, and the result has the dtype of the rank's rows (`parallel/ordered_sums.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphpp.runtime.gradients.accumulate import dtype_of_sum


@dataclass(frozen=True)
class Precision:
    """`param_dtype`: of whole parameters; `reduce_dtype`: of the gradients sent. None: no cast."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def of_whole(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of a whole parameter whose rows have `dtype`."""
        return floating_as(self.param_dtype, dtype)

    def of_sums(self, parameter: torch.Tensor, widened: torch.dtype | None) -> torch.dtype:
        """The dtype in which a parameter's whole gradients add up over the microbatches."""
        whole = self.of_whole(parameter.dtype)
        if whole is parameter.dtype:
            return dtype_of_sum(parameter, widened)
        return torch.promote_types(whole, widened) if widened is not None else whole

    def of_messages(self, sums: torch.dtype) -> torch.dtype:
        return floating_as(self.reduce_dtype, sums)


def floating_as(wanted: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """`wanted` in place of another floating dtype; `own` for other dtypes, and if `wanted` is None."""
    return wanted if wanted is not None and own.is_floating_point else own
