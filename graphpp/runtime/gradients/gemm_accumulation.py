"""Gradients that are matrix products, multiplied straight into the sum over the microbatches (fused accumulation).

- A program does not compute a gradient that is a product and that no other operation reads. It hands out the factors,
  `sink.matmul(index, a, b)`, with a: [m, k], b: [k, n], or batches [.., m, k], [.., k, n]; the accumulator's multiplication
  writes into the sum of gradients.
- `deferred_matmul` is the node of such a gradient in a graph (made by `passes/stage/fuse_grad_accumulation.py`).
- A product may lie in its gradient with other strides or another shape. `MatmulLayout` is (the gradient's shape, the product's
  shape, the product's strides in elements), for a contiguous gradient. None: the product is the gradient.
- `MatmulKernel` multiplies; a backend may have its own (`backends/kernels.py`).
"""

from __future__ import annotations

import torch

MatmulLayout = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class MatmulKernel:
    """Multiplies matrices, [m, k] by [k, n], or batches, by torch's own kernels: `addmm` with beta=1 adds while it writes."""

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)

    def multiply_add(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product into `total`, which has the product's shape and dtype, and any strides."""
        if a.dim() == 2:
            total.addmm_(a, b)
        else:
            total.baddbmm_(a, b)


def gradient_of(kernel: MatmulKernel, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None) -> torch.Tensor:
    """The gradient with the factors `a` and `b`, in newly allocated memory."""
    if layout is None:
        return kernel.multiply(a, b)
    shape, inner, strides = layout
    gradient = a.new_zeros(shape)
    kernel.multiply_add(gradient.as_strided(inner, strides), a, b)
    return gradient


def deferred_matmul(a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> torch.Tensor:
    """The gradient with the factors `a` and `b`: the target of graph nodes whose program hands out the factors."""
    return gradient_of(MatmulKernel(), a, b, layout)
