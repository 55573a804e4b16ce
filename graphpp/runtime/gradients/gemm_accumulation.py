"""Gradients that are matrix products, and who multiplies.

Contract
--------
- A program whose gradient is a product that nobody else reads hands out the factors: `take.product(index, a, b)`, with
  matrices a: [m, k], b: [k, n], or batches of them [.., m, k], [.., k, n]. Whoever adds gradients up lets the product write
  into the sum; no gradient is made.
- A product may lie in its gradient in another order or shape: `within` is (the gradient's shape, the product's shape, the
  product's strides in elements) in the memory of a contiguous gradient. Without it the product is the gradient.
- `Products` is the kernel that multiplies, to be exchanged; `TorchProducts` calls BLAS.
"""

from __future__ import annotations

from typing import Protocol

import torch

Within = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


class Products(Protocol):
    """Multiplies matrices, [m, k] by [k, n], or batches of them."""

    def make(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product, in memory of its own."""

    def add(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product into `total`, which has its shape and dtype, and any strides."""


class TorchProducts:
    """torch's own products: `addmm` with beta=1 adds while it writes."""

    def make(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product, in memory of its own."""
        return torch.mm(a, b) if a.dim() == 2 else torch.bmm(a, b)

    def add(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the product into `total`."""
        if a.dim() == 2:
            total.addmm_(a, b)
        else:
            total.baddbmm_(a, b)


def gradient_of(products: Products, a: torch.Tensor, b: torch.Tensor, within: Within | None) -> torch.Tensor:
    """The gradient that a product is, in memory of its own."""
    if within is None:
        return products.make(a, b)
    shape, inner, strides = within
    gradient = a.new_zeros(shape)
    products.add(gradient.as_strided(inner, strides), a, b)
    return gradient


def product(a: torch.Tensor, b: torch.Tensor, within: Within | None = None) -> torch.Tensor:
    """What stands in a graph for a gradient whose factors the program hands out; it is the gradient."""
    return gradient_of(TorchProducts(), a, b, within)


class Take(Protocol):
    """What a program hands its gradients to, each as soon as it is made; `index` counts the program's results."""

    def __call__(self, index: int, value: torch.Tensor) -> torch.Tensor | None:
        """Take a gradient; what stands in its place among the results."""

    def product(
        self, index: int, a: torch.Tensor, b: torch.Tensor, within: Within | None = None
    ) -> torch.Tensor | None:
        """Take a gradient that is a product of matrices."""


class Returned:
    """Gradients are results like the others. (This stands in the text of programs, and needs nothing but torch.)"""

    def __call__(self, index, value):  # type: ignore[no-untyped-def]
        """The gradient itself."""
        return value

    def product(self, index, a, b, within=None):  # type: ignore[no-untyped-def]
        """The gradient whose factors these are; `within`: its shape, and the product's shape and strides in it."""
        value = torch.matmul(a, b)
        if within is None:
            return value
        shape, inner, strides = within
        gradient = value.new_empty(shape)
        gradient.as_strided(inner, strides).copy_(value)
        return gradient
