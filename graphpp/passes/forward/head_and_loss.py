"""Find a head whose results only a cross entropy reads: a linear layer, operations on its rows, the loss.

Contract of `head_of(loss)`
- The operations between the two do the same to each word and to each row: views, slices, casts to at least the precision of
  the head, a product with or quotient by a number. Each has one reader, and the next is the loss.
- The loss has class indices [rows], a mean or a sum over the rows, an index to ignore, and label smoothing. No in-place
  operation between the two writes to the head's input, weight or bias.
- For any other cross entropy `Stays` says which operation is in the way, and why.
`rows_before_head` moves the operations before the head: they then act on the head's input.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpp.passes.graph.aliases import shares_memory

aten = torch.ops.aten
LOSS, LINEAR = aten.cross_entropy_loss.default, aten.linear.default
_LOSS_NAMES = tuple(each.name for each in LOSS._schema.arguments)
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_FLATTEN = aten.flatten.using_ints
_COPIES = {_FLATTEN, aten.contiguous.default, aten.clone.default, aten.alias.default}
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout}
_SCALES = {aten.mul.Tensor: operator.mul, aten.div.Tensor: operator.truediv, aten.mul.Scalar: operator.mul}


class Stays(Exception):  # noqa: N818 - it names an outcome
    """Why a cross entropy stays as it is; `node` is the operation that keeps it."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


@dataclass(frozen=True)
class HeadAndLoss:
    """A head and its cross entropy. `chain`: the operations between them, the one before the loss first."""

    linear: fx.Node
    chain: tuple[fx.Node, ...]
    loss: fx.Node
    target: fx.Node
    mean: bool
    ignore_index: int
    smoothing: float

    @property
    def words(self) -> Any:
        return self.linear.meta["val"].shape[-1]

    @property
    def operands(self) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """The head's input, weight and bias."""
        return (*args_of(self.linear), None)[:3]


def head_of(loss: fx.Node) -> HeadAndLoss:
    """The head of a cross entropy. Raises `Stays`."""
    given: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(_LOSS_NAMES, loss.args, strict=False)) | loss.kwargs
    _check_form(loss, given, given["target"].meta["val"])
    *chain, linear = _chain(given["self"])
    _check_writes(linear, loss)
    mean, smoothing = given["reduction"] == 1, given["label_smoothing"]
    return HeadAndLoss(linear, tuple(chain), loss, given["target"], mean, given["ignore_index"], smoothing)


def weights_of_heads(module: fx.GraphModule) -> set[str]:
    """The attributes of a module that are weights of heads; an empty set if another cross entropy has no such head."""
    found = set[str]()
    for loss in [node for node in module.graph.nodes if node.target is LOSS]:
        try:
            weight = head_of(loss).operands[1]
        except Stays:
            return set()
        if weight.op != "get_attr":
            return set()
        found.add(str(weight.target))
    return found


def rows_before_head(graph: fx.Graph, found: HeadAndLoss) -> tuple[fx.Node, float]:
    """The head's input after the operations on the rows, inserted at the graph's insertion point; the factor of the logits."""
    rows, scale = found.operands[0], 1.0
    width = rows.meta["val"].shape[-1]
    for node in reversed(found.chain):
        if node.target in _SCALES:
            scale = _SCALES[node.target](scale, args_of(node)[1])
        elif node.target not in _CASTS:
            args = list(args_of(node)[1:])
            if node.target in _VIEWS:
                args = [[*args[0][:-1], width]]
            target: Any = node.target
            rows = like(node, graph.call_function(target, (rows, *args), dict(node.kwargs)))
    return rows, scale


def args_of(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def like(source: fx.Node, node: Any) -> Any:
    """The node with another's place in the model and the user's source, without its value."""
    if isinstance(node, fx.Node):
        node.meta = {name: each for name, each in source.meta.items() if name != "val"}
    return node


def _check_form(loss: fx.Node, given: dict[str, Any], target: torch.Tensor) -> None:
    if given["weight"] is not None:
        raise Stays(loss, "the cross entropy has class weights")
    if given["reduction"] not in (1, 2):
        raise Stays(loss, 'the cross entropy has reduction="none"')
    if target.is_floating_point():
        raise Stays(loss, "the targets of the cross entropy are probabilities")
    if target.dim() != 1:
        raise Stays(loss, f"the targets of the cross entropy have {target.dim()} dimensions: flatten them and the logits")


def _check_writes(linear: fx.Node, loss: fx.Node) -> None:
    """Raise `Stays` if an operation between the two writes to memory that the linear layer reads."""
    read, node = {_memory(operand) for operand in linear.all_input_nodes}, linear.next
    while node is not loss:
        if _writes(node) and _memory(node) in read:
            raise Stays(node, "the head's input, weight or bias is changed in place after the head has read it")
        node = node.next


def _writes(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(node.all_input_nodes)


def _memory(node: fx.Node) -> Any:
    """The node that allocated a value's memory; of a parameter or buffer the name."""
    while shares_memory(node) or _writes(node):
        node = node.all_input_nodes[0]
    return node.target if node.op == "get_attr" else node


def _chain(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes from the loss's input back to the linear layer, included."""
    words = node.meta["val"].shape[-1]
    while True:
        if len(node.users) > 1:
            raise Stays(node, "the logits are read by other operations than the cross entropy, or returned")
        yield node
        if node.target is LINEAR:
            return
        source = (*args_of(node), None)[0]
        if not isinstance(source, fx.Node) or not _is_on_rows(node) or source.meta["val"].shape[-1] != words:
            raise Stays(node, f"{node.target} stands between a linear layer and the cross entropy")
        node = source


def _is_on_rows(node: fx.Node) -> bool:
    """Whether an operation on logits [.., words] does the same to each word, and to each row."""
    if node.target is aten.slice.Tensor:
        dims = node.meta["val"].dim()
        return bool((*args_of(node), 0)[1] % dims != dims - 1)
    if node.target in _CASTS:  # softmax is computed in at least 32 bits, and in no more than the head is
        before = args_of(node)[0].meta["val"].dtype
        return node.meta["val"].dtype in (before, torch.promote_types(before, torch.float32))
    return node.target in _VIEWS | _COPIES or (node.target in _SCALES and isinstance(args_of(node)[1], int | float))
