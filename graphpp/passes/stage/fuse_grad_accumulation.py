"""Fuse gradient accumulation: a matrix product that is a gradient is added directly into the gradient's sum.

Contract, for the backward graphs (B, I, W) of a cut:
- A gradient that is a (batched) matrix product with no other reader becomes a node `deferred_matmul(a, b)`. The program passes
  the factors to the runtime (`text/render.py`), which adds the product into the sum over the microbatches. Operations
  between product and gradient that only reorder, reshape or widen the elements disappear: `deferred_matmul(a, b, layout)` says
  where the product lies in the gradient. A transposed product has its factors exchanged and transposed, so that the
  multiplication writes in memory order.
- A gradient that is a sum becomes several results with the same role, which the runtime adds one by one.
- `meta["workspace"]` of a `deferred_matmul` node: the bytes that its multiplication takes besides the sum.
- Numbers change only by rounding.
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

ProductWorkspace = Callable[[torch.Tensor, torch.Tensor], int]
"""The bytes that a kernel takes, besides the sum, to add the (batched) product of two matrices to a sum."""

InverseView = Callable[[fx.Node, torch.Tensor], torch.Tensor]


def _reshaped(node: fx.Node, place: torch.Tensor) -> torch.Tensor:
    return place.view(node.args[0].meta["val"].shape)  # type: ignore[union-attr]


def _permuted(node: fx.Node, place: torch.Tensor) -> torch.Tensor:
    order = [axis % place.dim() for axis in node.args[1]]  # type: ignore[union-attr,operator]
    return place.permute([order.index(axis) for axis in range(place.dim())])


_UNDO: dict[object, InverseView] = {  # rearranging operation -> view from the place of its result to the place of its source
    aten.t.default: lambda node, place: place.t(),
    aten.transpose.int: lambda node, place: place.transpose(node.args[1], node.args[2]),  # type: ignore[arg-type]
    aten.permute.default: _permuted,
    **dict.fromkeys((aten.clone.default, aten.contiguous.default, aten._to_copy.default), lambda node, place: place),
    **dict.fromkeys((aten.reshape.default, aten.view.default, aten._unsafe_view.default), _reshaped),
    **dict.fromkeys((aten.unsqueeze.default, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshaped),
}


def fuse_grad_accumulation(staged: StagedGraphs, workspace: ProductWorkspace | None = None) -> StagedGraphs:
    graphs = {key: _rewritten(each) if key[0].is_backward else each for key, each in staged.graphs.items()}
    if workspace is not None:
        for each in graphs.values():
            for node in each.graph.find_nodes(op="call_function", target=deferred_matmul):
                node.meta["workspace"] = workspace(node.args[0].meta["val"], node.args[1].meta["val"])
    return replace(staged, graphs=graphs, fused=True)


def _rewritten(whole: PhaseGraph) -> PhaseGraph:
    graph = fx.Graph()
    values: tuple[fx.Node, ...] = graph.graph_copy(whole.graph, {})  # type: ignore[assignment]
    end = graph.output(values)
    results: GraphResults = []
    for role, value in zip(whole.outputs, values, strict=True):
        if isinstance(role, Gradient) and values.count(value) == 1:
            results += [(role, _deferred(part) or part.value) for part in _addends(value, end)]
        else:
            results.append((role, value))
    end.args = (tuple(value for _, value in results),)
    end.meta = {**whole.graph.output_node().meta, "roles": [role for role, _ in results]}
    remove_unused(graph)
    graph.lint()
    rewritten = replace(whole, graph=graph, outputs=tuple(role for role, _ in results))
    _check(whole, rewritten)
    return rewritten


@dataclass(frozen=True)
class _Addend:
    """A term of a gradient, and its reader on the path to the gradient; `alone`: the term has no other reader."""

    value: fx.Node
    reader: fx.Node

    @property
    def alone(self) -> bool:
        return set(self.value.users) == {self.reader}


def _addends(value: fx.Node, reader: fx.Node) -> list[_Addend]:
    """The terms of a tree of additions, in order; a sum with another reader is one term."""
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


def _deferred(addend: _Addend) -> fx.Node | None:
    """A `deferred_matmul` node for a term; None if it is no product, or strides cannot express its place in the gradient."""
    path: list[fx.Node] = []
    part = addend
    while part.alone and _only_rearranges(part.value):
        path.append(part.value)
        part = _Addend(part.value.args[0], part.value)  # type: ignore[arg-type]
    matmul = part.value
    if not part.alone or matmul.target not in _PRODUCTS or matmul.meta["val"].layout != torch.strided:
        return None
    place = _place(addend.value, path)
    if place is None:
        return None
    a, b = matmul.args
    if place.stride(-2) == 1 and place.stride(-1) != 1:
        (a, b), place = (_transposed(b, matmul), _transposed(a, matmul)), place.mT
    with matmul.graph.inserting_before(matmul):
        args = (a, b, *_layout(addend.value, place))
        node = matmul.graph.create_node("call_function", deferred_matmul, args, {}, f"{matmul.name}_product")
    node.meta = {**matmul.meta, "val": addend.value.meta["val"]}
    return node


def _only_rearranges(node: fx.Node) -> bool:
    """Whether a value has the elements of its source, in another order, shape or wider dtype."""
    if node.target not in _UNDO or not is_tensor(node.args[0]):  # type: ignore[arg-type]
        return False
    before, after = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
    return bool(
        torch.promote_types(before.dtype, after.dtype) == after.dtype
        and (before.dtype.is_floating_point, before.is_conj(), before.is_neg())
        == (after.dtype.is_floating_point, after.is_conj(), after.is_neg())
        and before.device == after.device
    )


def _place(gradient: fx.Node, path: list[fx.Node]) -> torch.Tensor | None:
    """The place of the product in a contiguous gradient, as a meta tensor; None if strides cannot express it."""
    place = torch.empty(gradient.meta["val"].shape, device="meta")
    try:
        for node in path:
            place = _UNDO[node.target](node, place)
    except RuntimeError:
        return None
    return place


def _layout(gradient: fx.Node, place: torch.Tensor) -> tuple[MatmulLayout, ...]:
    """The argument `layout` of `deferred_matmul`: none if product and gradient have the same layout."""
    shape = tuple(gradient.meta["val"].shape)
    if tuple(place.shape) == shape and place.is_contiguous():
        return ()
    return ((shape, tuple(place.shape), tuple(place.stride())),)


def _transposed(value: object, matmul: fx.Node) -> fx.Node:
    assert isinstance(value, fx.Node)
    if value.target is aten.t.default:
        return value.args[0]  # type: ignore[return-value]
    with matmul.graph.inserting_before(matmul):
        node = matmul.graph.call_function(aten.transpose.int, (value, -2, -1))
    node.meta = {**matmul.meta, "val": value.meta["val"].mT}
    return node


def _check(whole: PhaseGraph, rewritten: PhaseGraph) -> None:
    """Raise `AssertionError` unless roles are unchanged; a gradient may have several results."""
    before, after = list(dict.fromkeys(whole.outputs)), list(dict.fromkeys(rewritten.outputs))
    assert before == after, "a result of the backward is lost or doubled"
    assert rewritten.inputs == tuple(node.meta["role"] for node in rewritten.graph.find_nodes(op="placeholder"))
