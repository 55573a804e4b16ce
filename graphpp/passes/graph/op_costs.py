"""Estimate the seconds that one operation of a graph takes, from its shapes alone.

Contract: `OpCosts` is a callable node -> seconds. The model is a roofline: launch time, plus the larger of arithmetic and
memory traffic; for a collective, latency plus bytes over the link. Passes use only ratios of costs. Ranks that exchange values
must order their operations by the same costs, so the figures are constants instead of measurements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpp._torch.operators import flex_attention, linear_cross_entropy, packed_attention, recurrence
from graphpp._torch.symbols import hint
from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul
from graphpp.runtime.random_keys import seeded

aten = torch.ops.aten

Cost = Callable[[fx.Node], float]

_CONTRACTIONS = {2: aten.mm.default, 3: aten.bmm.default}
_CHEAP_FLOPS_PER_ELEMENT = 16
_FLOPS_PER_DRAW = 20
_LIKE: dict[Any, Any] = {  # kernel without an entry in torch's table -> kernel with the same arithmetic and arguments
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
_READING_ONCE = {  # besides the operators that torch tags pointwise: copies, look-ups, and norms over rows
    aten._to_copy, aten.cat, aten.stack, aten.embedding, aten.index_select, aten.gather, aten.constant_pad_nd, aten.repeat,
    aten.arange, aten.full, aten.full_like, aten.zeros, aten.zeros_like, aten.ones, aten.ones_like, aten.tril, aten.triu,
    aten.native_layer_norm, aten.native_group_norm, getattr(aten, "_fused_rms_norm", aten.native_layer_norm),
}  # fmt: skip


@dataclass(frozen=True)
class OpCosts:
    """A device: FLOP/s, memory bytes/s, seconds to launch a kernel; and its link: latency in seconds, bytes/s."""

    flops: float
    memory: float
    launch: float
    latency: float
    link: float

    @classmethod
    def of(cls, device_type: str) -> OpCosts:
        """Round figures for one CPU core with loopback, or for one data-centre GPU with NVLink."""
        if device_type == "cpu":
            return cls(flops=5e10, memory=1e10, launch=3e-6, latency=1e-4, link=1e9)
        return cls(flops=3e14, memory=2e12, launch=5e-6, latency=2e-5, link=1e11)

    def __call__(self, node: fx.Node) -> float:
        """Seconds that a node takes; for a collective, until its result has arrived."""
        if is_wait(node) or is_view(node) or node.op != "call_function":
            return 0.0
        read = sum(map(nbytes, node.all_input_nodes))
        if is_collective(node):
            return self.latency + max(read, nbytes(node)) / self.link
        traffic = (read + nbytes(node)) / self.memory
        return self.launch + max(flops(node) / self.flops, traffic) + self._drawing(node)

    def message(self, nbytes: int) -> float:
        """Seconds of a message of `nbytes` between two ranks; 0 without bytes."""
        return self.latency + nbytes / self.link if nbytes else 0.0

    def _drawing(self, node: fx.Node) -> float:
        """Seconds of a random operator's generator: its state is set and restored, and every number is computed."""
        if node.target is not seeded:
            return 0.0
        return 2 * self.launch + _FLOPS_PER_DRAW * _elements(node) / self.flops


def flops(node: fx.Node, operands: Mapping[fx.Node, Any] | None = None, result: Any = None) -> float:
    """Floating-point operations of a contraction, as torch counts them; 0 for other operations.

    `operands`, `result`: values in place of the graph's, for the same operation on other operands.
    """
    # This import loads Triton if installed, which `import graphpp` avoids.
    from torch.utils.flop_counter import flop_registry

    target, args = node.target, node.args
    if target is seeded:
        target, args = args[2], args[3:]  # type: ignore[assignment]
    if target is deferred_matmul:
        target, args = _CONTRACTIONS[args[0].meta["val"].dim()], args[:2]  # type: ignore[union-attr]
    packet = getattr(target, "overloadpacket", target)  # operators with bodies have none
    packet = _LIKE.get(packet, packet)
    if packet not in flop_registry and packet not in _OWN:
        return 0.0
    value_of: Callable[[fx.Node], Any] = lambda source: source.meta["val"] if operands is None else operands[source]  # noqa: E731
    args, kwargs = fx.node.map_arg(args, value_of), fx.node.map_arg(node.kwargs, value_of)
    if packet in _OWN:
        return float(hint(_OWN[packet](*args)))
    return float(hint(flop_registry[packet](*args, **kwargs, out_val=node.meta["val"] if operands is None else result)))


def _flops_of_groups(left: torch.Tensor, right: torch.Tensor, *rest: Any) -> Any:
    """FLOPs of a grouped product: the rows, columns, or inner sizes of all groups share one dimension."""
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return 2 * groups * left.shape[-2] * left.shape[-1] * right.shape[-1]


_OWN: Mapping[Any, Callable[..., Any]] = {  # kernels that torch does not count
    aten._grouped_mm: _flops_of_groups,
    linear_cross_entropy.LINEAR_CROSS_ENTROPY.overloadpacket: linear_cross_entropy.flops,
    recurrence.FORWARD: recurrence.forward_flops,
    recurrence.BACKWARD: lambda *operands: 3 * recurrence.forward_flops(*operands),
    flex_attention.FORWARD: flex_attention.forward_flops,
    flex_attention.BACKWARD: lambda *operands: 5 * flex_attention.forward_flops(*operands) // 2,
    packed_attention.FORWARD: packed_attention.forward_flops,
    packed_attention.BACKWARD: lambda *operands: 5 * packed_attention.forward_flops(*operands[3:]) // 2,
}


def is_heavy(node: fx.Node) -> bool:
    """Whether the operation is a contraction with more than a few operations per element of its result."""
    return flops(node) > _CHEAP_FLOPS_PER_ELEMENT * max(_elements(node), 1)


def is_cheap(node: fx.Node) -> bool:
    """Whether the operation reads every input element about once: pointwise, a copy, a look-up, a norm, a view."""
    if is_view(node) or torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return True
    return getattr(node.target, "overloadpacket", None) in _READING_ONCE


def nbytes(node: fx.Node) -> int:
    """Bytes of a node's value; for a tuple, the sum."""
    return _nbytes(node.meta.get("val"))


def _elements(node: fx.Node) -> int:
    """Elements of a node's value; for a tuple, of the largest tensor."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return max((hint(item.numel()) for item in values if isinstance(item, torch.Tensor)), default=0)


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return int(hint(value.numel())) * value.dtype.itemsize
    return sum(map(_nbytes, value)) if isinstance(value, tuple | list) else 0
