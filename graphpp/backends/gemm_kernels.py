"""Choose the kernel of each matrix product by measurement: torch's or oneDNN's, once per shape, processor and thread count.

Contract: `GemmKernels.replace_matmuls` replaces, in a graph, each float32 matrix product on the CPU by oneDNN's kernel if
that kernel was faster when both ran in turn. `multiply` and `multiply_add` choose in the same way for gradients that a
program hands over as two factors (`runtime/gradients/gemm_accumulation.py`). The faster kernel depends on the processor, by a
factor of two on some. The results of the two kernels differ in the last bits. On other devices and for other dtypes, torch's
kernel stays. Measurements are kept in the disk cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import known
from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp.backends.measured_choices import MeasuredChoices, layout_of, sample, shortest_times
from graphpp.cache.disk_cache import DiskCache
from graphpp.runtime.gradients.gemm_accumulation import TorchMatmul

_aten = torch.ops.aten
_LINEAR: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default)
_BATCH = 32  # larger batches hold small matrices, where one call per matrix costs more than the kernel gains
_GAIN = 0.95  # oneDNN must take less than this fraction of the time of torch's kernel
_TABLE = "products.json"
_ONEDNN, _TORCH = "linear", "mm"  # as the cached table has them


def onednn_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` by oneDNN: [m, k] @ [k, n], or [batch, m, k] @ [batch, k, n]."""
    if a.dim() == 3:
        return torch.stack([onednn_matmul(*factors) for factors in zip(a.unbind(), b.unbind(), strict=True)])
    result: torch.Tensor = _LINEAR(a, b.t(), None, "none", [], "")
    return result


class GemmKernels:
    """Measures and remembers the faster kernel; `cache` keeps the measurements for other processes and later runs."""

    def __init__(self, cache: DiskCache) -> None:
        self._choices = MeasuredChoices(cache, _TABLE, (_ONEDNN, _TORCH))
        self._known: dict[Any, bool] = {}
        self._usual = TorchMatmul()

    def replace_matmuls(self, graph: fx.Graph) -> None:
        """Replace matrix products by oneDNN's kernel, in place, where that is faster; nodes must carry `meta["val"]`."""
        for node in [node for node in graph.nodes if node.target in _PRODUCTS and _is_eligible_node(node)]:
            *bias, a, b = node.args
            if not self.prefers_onednn(a.meta["val"], b.meta["val"]):
                continue
            with graph.inserting_before(node):
                product = _batched(graph, a, b) if node.target is _aten.bmm.default else _linear(graph, a, b, *bias)
            product.meta = dict(node.meta)
            node.replace_all_uses_with(product)
            graph.erase_node(node)

    def multiply(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """`a @ b`, in new memory."""
        if is_eligible(a, b) and self.prefers_onednn(a, b):
            return onednn_matmul(a, b)
        return self._usual.multiply(a, b)

    def multiply_add(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add `a @ b` into `total`, in place."""
        if not (is_eligible(a, b) and self.prefers_onednn(a, b)):
            self._usual.multiply_add(total, a, b)
        elif a.dim() == 3:
            for part, *factors in zip(total, a, b, strict=True):
                part.add_(onednn_matmul(*factors))
        else:
            total.add_(onednn_matmul(a, b))

    def prefers_onednn(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        """True if oneDNN's kernel is faster for operands of these shapes and strides; fake tensors are allowed.

        Of symbolic sizes those of the trace count.
        """
        shapes = tuple(tuple(map(hint, sizes)) for sizes in (a.shape, a.stride(), b.shape, b.stride()))
        known = self._known.get(shapes)
        if known is None:
            key = f"{layout_of(a)} {layout_of(b)}"
            chosen = self._choices.choose(key, lambda: _faster(sample(a), sample(b)))
            known = self._known[shapes] = chosen == _ONEDNN
        return known


def product_workspace(a: torch.Tensor, b: torch.Tensor) -> int:
    """The most bytes that `GemmKernels.multiply_add` takes beside the sum: oneDNN's kernel, if it is chosen, does not add.

    Follows from the factors' layouts, on all ranks alike: each rank measures which kernel is faster.
    """
    if not _both_can(a, b):
        return 0
    elements: int = known(a.shape[-2] * b.shape[-1])  # a batch is multiplied matrix by matrix
    return elements * a.dtype.itemsize


def is_eligible(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both kernels can compute this product and it has elements."""
    return _both_can(a, b) and all(hint(value.numel()) for value in (a, b))


def _both_can(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if both kernels can compute this product: float32 on the CPU, two matrices or a batch of at most `_BATCH`."""
    both = (a, b)
    on_cpu = all(value.device.type == "cpu" and value.dtype is torch.float32 for value in both)
    several = a.dim() == b.dim() == 3 and not isinstance(a.shape[0], SYMBOLIC)
    few = a.dim() == b.dim() == 2 or (several and len(a) <= _BATCH)
    return on_cpu and few and torch.backends.mkldnn.is_available()


def _linear(graph: fx.Graph, a: fx.Node, b: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    """Insert nodes that compute `a @ b + bias` by oneDNN."""
    transposed = graph.call_function(_aten.permute.default, (b, [1, 0]))
    transposed.meta["val"] = b.meta["val"].t()
    product = graph.call_function(_LINEAR, (a, transposed, bias, "none", [], ""))
    product.meta["val"] = _empty(a.meta["val"], b.meta["val"])
    return product


def _batched(graph: fx.Graph, a: fx.Node, b: fx.Node) -> fx.Node:
    """Insert nodes that compute each product of a batch by a call of its own."""
    products = []
    for index in range(len(a.meta["val"])):
        factors = [graph.call_function(_aten.select.int, (value, 0, index)) for value in (a, b)]
        for factor, value in zip(factors, (a, b), strict=True):
            factor.meta["val"] = value.meta["val"][index]
        whole = graph.call_function(_aten.unsqueeze.default, (_linear(graph, *factors), 0))
        whole.meta["val"] = _empty(*(factor.meta["val"] for factor in factors))[None]
        products.append(whole)
    return graph.call_function(_aten.cat.default, (products,))


def _empty(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A tensor with the shape of `a @ b`."""
    return a.new_empty(a.shape[0], b.shape[1])


def _is_eligible_node(node: fx.Node) -> bool:
    plain = not node.kwargs and all(isinstance(arg, fx.Node) for arg in node.args)
    if not plain:
        return False
    *bias, a, b = (arg.meta["val"] for arg in node.args)  # type: ignore[union-attr]
    return all(value.dim() == 1 for value in bias) and is_eligible(a, b)


def _faster(a: torch.Tensor, b: torch.Tensor) -> str:
    """The name of the faster kernel."""
    usual, other = shortest_times([lambda: torch.matmul(a, b), lambda: onednn_matmul(a, b)])
    return _ONEDNN if other < _GAIN * usual else _TORCH
