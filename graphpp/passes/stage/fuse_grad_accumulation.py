"""Accumulate products: gradients go into their sums where they are made.

Contract, for every backward of a cut:
- A gradient that is the product of two matrices (or of two batches of them), which nobody else reads, becomes a node
  `deferred_matmul(a, b)`, which the program hands out as its factors (`render`): the sum over the microbatches is written by
  the multiplication itself. What stands between product and gradient, and only says in which order or in which wider dtype,
  is gone: `deferred_matmul(a, b, within)` says where the product lies. A transposed product has its factors exchanged and
  transposed, so that it writes in the order of the memory.
- A gradient that is a sum becomes several results with one role, which are added one by one: a parameter that is used
  twice is not added up first.
- All else stays: inputs, other results, the order of operations. Numbers change by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import fx

from graphpp.passes.graph.joint_graph import is_tensor, remove_unused
from graphpp.passes.graph.stage_graphs import GraphResults, PhaseGraph, StagedGraphs
from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout, deferred_matmul
from graphpp.runtime.program import Gradient

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.bmm.default)

InverseView = Callable[[fx.Node, torch.Tensor], torch.Tensor]


def _same(node: fx.Node, room: torch.Tensor) -> torch.Tensor:
    return room


def _reshaped(node: fx.Node, room: torch.Tensor) -> torch.Tensor:
    return room.view(node.args[0].meta["val"].shape)  # type: ignore[union-attr]


def _transposed_back(node: fx.Node, room: torch.Tensor) -> torch.Tensor:
    return room.transpose(node.args[1], node.args[2])  # type: ignore[arg-type]


def _permuted(node: fx.Node, room: torch.Tensor) -> torch.Tensor:
    order = [axis % room.dim() for axis in node.args[1]]  # type: ignore[union-attr,operator]
    return room.permute([order.index(axis) for axis in range(room.dim())])


_UNDO: dict[object, InverseView] = {  # each element stays one element; from where the result lies to where its source does
    aten.t.default: lambda node, room: room.t(),
    aten.transpose.int: _transposed_back,
    aten.permute.default: _permuted,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten._to_copy.default: _same,
    **dict.fromkeys((aten.reshape.default, aten.view.default, aten._unsafe_view.default), _reshaped),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshaped),
}


def fuse_grad_accumulation(staged: StagedGraphs) -> StagedGraphs:
    """The staged with backwards that hand out the factors of their gradients; graphs of `staged` stay as they are."""
    slots = {slot: _rewritten(whole) if slot[0].is_backward else whole for slot, whole in staged.graphs.items()}
    return replace(staged, graphs=slots, fused=True)


def _rewritten(whole: PhaseGraph) -> PhaseGraph:
    graph = fx.Graph()
    values: tuple[fx.Node, ...] = graph.graph_copy(whole.graph, {})  # type: ignore[assignment]
    end = graph.output(values)
    results: GraphResults = []
    for role, value in zip(whole.outputs, values, strict=True):
        if isinstance(role, Gradient) and values.count(value) == 1:
            results += [(role, _handed_out(part) or part.value) for part in _addends(value, end)]
        else:
            results.append((role, value))
    end.args = (tuple(value for _, value in results),)
    end.meta = {**whole.graph.output_node().meta, "roles": [role for role, _ in results]}
    remove_unused(graph)
    graph.lint()
    made = replace(whole, graph=graph, outputs=tuple(role for role, _ in results))
    _check(whole, made)
    return made


@dataclass(frozen=True)
class _Addend:
    """A value, and its reader on the way to the gradient; `alone`: nobody else reads it."""

    value: fx.Node
    reader: fx.Node

    @property
    def alone(self) -> bool:
        return set(self.value.users) == {self.reader}


def _addends(value: fx.Node, reader: fx.Node) -> list[_Addend]:
    """What a tree of additions adds, in order; a sum that somebody else reads too is one addend."""
    found = _Addend(value, reader)
    args = value.args
    plain = value.target is aten.add.Tensor and len(args) == 2 and not value.kwargs and args[0] is not args[1]
    if not plain or not found.alone or not all(isinstance(arg, fx.Node) and _alike(arg, value) for arg in args):
        return [found]
    return [each for arg in args for each in _addends(arg, value)]  # type: ignore[arg-type]


def _alike(one: fx.Node, other: fx.Node) -> bool:
    if not is_tensor(one):
        return False
    a, b = one.meta["val"], other.meta["val"]
    return bool(a.shape == b.shape and a.dtype == b.dtype)


def _handed_out(addend: _Addend) -> fx.Node | None:
    """A node that hands out the factors of a gradient; None where it is no product, or cannot be written in place."""
    path: list[fx.Node] = []
    part = addend
    while part.alone and _only_rearranges(part.value):
        path.append(part.value)
        part = _Addend(part.value.args[0], part.value)  # type: ignore[arg-type]
    made = part.value
    if not part.alone or made.target not in _PRODUCTS or made.meta["val"].layout != torch.strided:
        return None
    room = _room(addend.value, path)
    if room is None:
        return None
    a, b = made.args
    if room.stride(-2) == 1 and room.stride(-1) != 1:
        (a, b), room = (_transposed(b, made), _transposed(a, made)), room.mT
    with made.graph.inserting_before(made):
        args = (a, b, *_within(addend.value, room))
        node = made.graph.create_node("call_function", deferred_matmul, args, {}, f"{made.name}_product")
    node.meta = {**made.meta, "val": addend.value.meta["val"]}
    return node


def _only_rearranges(node: fx.Node) -> bool:
    """Whether a value is its source in another order, shape or wider dtype."""
    if node.target not in _UNDO or not is_tensor(node.args[0]):  # type: ignore[arg-type]
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(
        torch.promote_types(before.dtype, after.dtype) == after.dtype
        and (before.dtype.is_floating_point, before.is_conj(), before.is_neg())
        == (after.dtype.is_floating_point, after.is_conj(), after.is_neg())
        and before.device == after.device
    )


def _room(gradient: fx.Node, path: list[fx.Node]) -> torch.Tensor | None:
    """Where the product lies in a contiguous gradient, as a tensor without memory; None where strides cannot say it."""
    room = torch.empty(gradient.meta["val"].shape, device="meta")
    try:
        for node in path:
            room = _UNDO[node.target](node, room)
    except RuntimeError:
        return None
    return room


def _within(gradient: fx.Node, room: torch.Tensor) -> tuple[MatmulLayout, ...]:
    """What a product is told about its place: nothing where it is the gradient, element by element."""
    shape = tuple(gradient.meta["val"].shape)
    if tuple(room.shape) == shape and room.is_contiguous():
        return ()
    return ((shape, tuple(room.shape), tuple(room.stride())),)


def _transposed(value: object, made: fx.Node) -> fx.Node:
    """A factor of the product `made` with its rows as columns."""
    assert isinstance(value, fx.Node)
    if value.target is aten.t.default:
        return value.args[0]  # type: ignore[return-value]
    with made.graph.inserting_before(made):
        node = made.graph.call_function(aten.transpose.int, (value, -2, -1))
    node.meta = {**made.meta, "val": value.meta["val"].mT}
    return node


def _check(whole: PhaseGraph, made: PhaseGraph) -> None:
    """The results are the same, but for gradients that come in several parts."""
    before, after = list(dict.fromkeys(whole.outputs)), list(dict.fromkeys(made.outputs))
    assert before == after, "a result of the backward is lost or doubled"
    assert made.inputs == tuple(node.meta["role"] for node in made.graph.find_nodes(op="placeholder"))
