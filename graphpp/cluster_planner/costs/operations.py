"""The operations of a segment's phase as data: figures that a device model prices, and how they scale with rows and ranks.

The nodes of a phase graph must carry the metas of `facts.py`. A size is a sum of terms: an amount (bytes or FLOPs) in the
captured graph, multiplied by a power of the rows and divided by powers of the tensor-parallel and expert-parallel ranks.
Adjacent pointwise operations, reductions and look-ups count as one fused kernel, which reads its operands and writes its
results once. A reduction over the first dimension ends its kernel: operations that read its result, such as a cast to float8
by the largest element, read their other operands once more.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import hint
from graphpp.cluster_planner.costs.dims import called
from graphpp.passes.graph.aliases import root, shares_memory
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.op_costs import is_cheap
from graphpp.passes.joint.key_dropout_and_random_ops import named_arguments

aten = torch.ops.aten

Term = tuple[int, int, int, float]
"""(power of rows, power of 1/tp, power of 1/ep, amount in the captured graph)."""
Size = tuple[Term, ...]

ATTENTION = {
    aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
}  # fmt: skip
ATTENTION_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward, aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
}  # fmt: skip
_FUSED = {  # fused in addition to cheap operations: reductions, and assembly of pieces
    aten.sum, aten.mean, aten.max, aten.min, aten.amax, aten.amin, aten.var_mean, aten.var, aten._softmax, aten._log_softmax,
    aten._softmax_backward_data, aten._log_softmax_backward_data, aten.native_layer_norm_backward, aten.slice_backward,
    aten.select_backward, aten.slice_scatter, aten.native_dropout, aten.native_dropout_backward, aten.index,
    aten.nll_loss_forward, aten.nll_loss_backward, aten.copy, aten.new_zeros, aten.new_empty, aten.new_full, aten.new_ones,
    aten.new_empty_strided, aten.empty_like, aten.empty, aten.scatter,
    getattr(aten, "_fused_rms_norm_backward", aten.native_layer_norm_backward),
}  # fmt: skip

_REDUCTIONS = (aten.sum, aten.mean, aten.max, aten.min, aten.amax, aten.amin, aten.var_mean, aten.var)


@dataclass(frozen=True)
class Operation:
    """One kernel, or one exchange.

    `kind`: "product", "attention", "attention_backward", "memory"; an exchange: "all_reduce", "all_gather" (tensor
    parallelism), "all_to_all" (experts), "context" (keys and values, or their gradients). `nbytes`: read and written, or of the
    whole exchanged value; `sides`: m, n and k of a product; `grouped`: a product of experts, whose rows come from all
    expert-parallel ranks. `when`: of an exchange that takes place only where experts are "folded", or only where tensor
    parallelism divides them ("shared"). `parts`: of a fused kernel, the bytes that each of its operators reads and writes as a
    kernel of its own, which it is without a compiler; empty for other operations. `derived`: of values of parameters alone,
    which every backend computes once per step where whole stages are kept. `pieces`: how many equal kernels it is (empty: one).
    """

    kind: str
    dtype: str = ""
    flops: Size = ()
    nbytes: Size = ()
    sides: tuple[Size, ...] = ()
    grouped: bool = False
    when: str = ""
    parts: tuple[Size, ...] = ()
    derived: bool = False
    pieces: Size = ()


Counted = tuple[tuple[Operation, int], ...]


def summed(sizes: Iterable[Size]) -> Size:
    total: dict[tuple[int, int, int], float] = defaultdict(float)
    for size in sizes:
        for *powers, amount in size:
            total[tuple(powers)] += amount  # type: ignore[index]
    return tuple((*powers, amount) for powers, amount in sorted(total.items()) if amount)


def size_of(node: fx.Node) -> Size:
    """Bytes of a node's value; of a tuple, the sum."""
    return _size(node.meta.get("val"), node.meta.get("rows", ()), node.meta.get("sharded", ()), node.meta.get("experts", 0))


def _size(value: Any, rows: Any, sharded: Any, experts: int) -> Size:
    if isinstance(value, torch.Tensor):
        return ((sum(rows), sum(sharded), experts, float(hint(value.numel()) * value.dtype.itemsize)),)
    if isinstance(value, tuple | list):
        return summed(_size(*each, experts) for each in zip(value, rows, sharded, strict=True))
    return ()


def operations_of(graph: fx.Graph) -> Counted:
    """The kernels and exchanges of a phase graph, with counts."""
    found = Counter[Operation]()
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node in nodes:
        found.update(Operation(kind, nbytes=size, when=when) for kind, size, when in node.meta.get("exchanges", ()))
        if _is_kernel(node) and not _is_fused(node):
            found[_alone(node)] += 1
    found.update(_kernels([node for node in nodes if _is_kernel(node) and _is_fused(node)], graph))
    return tuple(found.items())


def _is_kernel(node: fx.Node) -> bool:
    free = shares_memory(node) or node.target is operator.getitem or is_wait(node) or is_collective(node)
    return not free and bool(size_of(node)) and not node.meta.get("constant")


def packet_of(node: fx.Node) -> Any:
    """The overload packet of the operator that a node runs."""
    return getattr(called(node)[0], "overloadpacket", None)


def _is_fused(node: fx.Node) -> bool:
    if node.meta.get("work"):
        return False
    pointwise = torch.Tag.pointwise in getattr(called(node)[0], "tags", ())
    return pointwise or is_cheap(node) or packet_of(node) in _FUSED


def _own_traffic(node: fx.Node) -> Size:
    return summed([size_of(node), *(_read(source) for source in node.all_input_nodes)])


def _alone(node: fx.Node) -> Operation:
    nbytes, derived = _own_traffic(node), bool(node.meta.get("derived"))
    work: Term | None = node.meta.get("work")
    if work is None:
        return Operation("memory", nbytes=nbytes, derived=derived)
    packet = packet_of(node)
    kind = "attention" if packet in ATTENTION else "attention_backward" if packet in ATTENTION_BACKWARD else "product"
    if kind != "product" and _is_causal(node):
        work = (*work[:3], work[3] / 2)
    dtype = next(filter(None, map(_dtype, node.all_input_nodes)), "")
    sides = _sides(node) if kind == "product" else ()
    return Operation(kind, dtype, (work,), nbytes, sides, packet is getattr(aten, "_grouped_mm", None), derived=derived)


def _dtype(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else ""


def _is_causal(node: fx.Node) -> bool:
    return bool(named_arguments(*called(node), node.kwargs).get("is_causal"))


def _sides(node: fx.Node) -> tuple[Size, ...]:
    """m, n and k of a matrix product; () for other contractions."""
    packet = packet_of(node)
    operands = [each for each in node.args if isinstance(each, fx.Node)]
    if packet in (aten.addmm, aten.baddbmm):
        operands = operands[1:]
    grouped = packet is getattr(aten, "_grouped_mm", None)
    if packet not in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm, aten._scaled_mm) and not grouped:
        return ()
    left, right = operands[:2]
    m, k, n = _side(left, -2), _side(left, -1), _side(right, -1)
    if grouped:  # the rows of all groups are concatenated
        groups = max(_groups(node), 1)
        ragged = 1 if left.meta["val"].dim() == 2 and right.meta["val"].dim() == 2 else 0
        m, k = (m, _divided(k, groups)) if ragged else (_divided(m, groups), k)
    return (m, n, k)


def _groups(node: fx.Node) -> int:
    offsets = node.args[2] if len(node.args) > 2 else node.kwargs.get("offs")
    return int(hint(offsets.meta["val"].shape[0])) if isinstance(offsets, fx.Node) else 1


def _divided(size: Size, by: int) -> Size:
    return tuple((*powers, amount / by) for *powers, amount in size)  # type: ignore[misc]


def _side(node: fx.Node, dim: int) -> Size:
    rows, sharded = node.meta["rows"][dim], node.meta["sharded"][dim]
    return ((rows, sharded, 0, float(hint(node.meta["val"].shape[dim]))),)


def _read(source: fx.Node) -> Size:
    """Bytes that an operation reads of a value: of an expanded value those in memory, of a view only its part."""
    own, whole = size_of(source), size_of(root(source))
    return own if not whole or sum(term[3] for term in own) <= sum(term[3] for term in whole) else whole


# -------------------------------------------------------------------------------------------- fused kernels


def _kernels(nodes: Sequence[fx.Node], graph: fx.Graph) -> Counter[Operation]:
    """Fuse operations that read each other without an unfused kernel in between."""
    fused = set(nodes)
    depth = _depths(graph, fused)
    group: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        mine = _leader(group, node)
        for source in map(_computed, node.all_input_nodes):
            if source in fused and depth[source] == depth[node]:
                group[_leader(group, source)] = mine
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        members[_leader(group, node)].append(node)
    found = Counter[Operation]()
    for each in members.values():
        derived = all(node.meta.get("derived") for node in each)
        found[Operation("memory", nbytes=_traffic(each), parts=tuple(map(_own_traffic, each)), derived=derived)] += 1
    return found


def _leader(group: dict[fx.Node, fx.Node], node: fx.Node) -> fx.Node:
    while group.get(node, node) is not node:
        group[node] = group.get(group[node], group[node])
        node = group[node]
    return node


def _computed(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and (shares_memory(node) or node.target is operator.getitem) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _depths(graph: fx.Graph, fused: set[fx.Node]) -> Mapping[fx.Node, int]:
    """The longest chain of kernels that end before each value."""
    depth: dict[fx.Node, int] = {}
    others = {node for node in graph.nodes if node.op == "call_function" and node not in fused and _is_kernel(node)}
    others |= {node for node in fused if _ends_kernel(node)}
    for node in graph.nodes:
        depth[node] = max((depth[each] + (each in others) for each in node.all_input_nodes), default=0)
    for node in reversed(list(depth)):  # a widening cast runs in the kernel of its readers, which then read fewer bytes
        if node in fused and node not in others and node.users and fused.issuperset(node.users) and _widens(node):
            depth[node] = min(depth[user] for user in node.users)
    return depth


def _widens(node: fx.Node) -> bool:
    read, made = (sum(term[3] for each in nodes for term in size_of(each)) for nodes in (node.all_input_nodes, [node]))
    return read < made


def _ends_kernel(node: fx.Node) -> bool:
    """Whether a fused operation reduces over the first dimension."""
    if packet_of(node) not in _REDUCTIONS:
        return False
    dims, rank = named_arguments(*called(node), node.kwargs).get("dim"), node.all_input_nodes[0].meta["val"].dim()
    each = [dims] if isinstance(dims, int) else dims or [0]
    return any(dim in (0, -rank) for dim in each)


def _traffic(members: Sequence[fx.Node]) -> Size:
    inside = set(members)
    read = {source: None for node in members for source in node.all_input_nodes if _computed(source) not in inside}
    memory: dict[fx.Node, Size] = {}
    for source in read:
        key, size = root(source), _read(source)
        if sum(term[3] for term in size) >= sum(term[3] for term in memory.get(key, ())):
            memory[key] = size
    written = (size_of(node) for node in members if _is_read_outside(node, inside))
    return summed([*memory.values(), *written])


def _is_read_outside(node: fx.Node, inside: set[fx.Node]) -> bool:
    pending = list(node.users)
    while pending:
        user = pending.pop()
        if user.op == "output" or (user not in inside and _computed(user) is not node and _computed(user) is user):
            return True
        if user not in inside:
            pending += user.users
    return False
