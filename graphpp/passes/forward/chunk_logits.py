"""Let a head and its cross entropy work through the tokens in pieces, so that the logits of all tokens never exist.

Contract of `chunk_logits(module, tokens, ..)`
- `linear` and `cross_entropy` become `linear_cross_entropy` (`_torch/operators`) if only operations on the rows stand between
  them (views, slices, a cast, a product with or quotient by a number) and the logits have no other reader. The operations on
  the rows then stand before the head.
- The loss has class indices [rows], a mean or a sum over the rows, an index to ignore, and label smoothing. For any other cross
  entropy the function returns the reason why it stays. The order of all else stays.
- The operator reads the head's input, weight and bias where the loss stood. If an in-place operation between the head and the
  loss writes to one of them, the cross entropy stays.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpp._torch.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY, Options
from graphpp.passes.graph.aliases import shares_memory

aten = torch.ops.aten
_LOSS, _LINEAR = aten.cross_entropy_loss.default, aten.linear.default
_LOSS_NAMES = tuple(each.name for each in _LOSS._schema.arguments)
_VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
_FLATTEN = aten.flatten.using_ints
_COPIES = {_FLATTEN, aten.contiguous.default, aten.clone.default, aten.alias.default}
_CASTS = {aten.to.dtype, aten._to_copy.default, aten.to.dtype_layout}
_SCALES = {aten.mul.Tensor: operator.mul, aten.div.Tensor: operator.truediv, aten.mul.Scalar: operator.mul}


class _Stays(Exception):  # noqa: N818 - it names an outcome
    """Why a cross entropy stays as it is; `node` is the operation that keeps it."""

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(reason)
        self.node = node


def chunk_logits(
    module: fx.GraphModule, tokens: int, autocast: torch.dtype | None
) -> tuple[int, list[tuple[fx.Node, str]]]:
    """Rewrite an exported forward in place: (how many losses were rewritten, the node and reason for which another was not).

    `tokens`: rows whose logits exist at one time. `autocast`: the dtype of autocast, under which the module will run.
    """
    rewritten, reasons = 0, list[tuple[fx.Node, str]]()
    for node in [node for node in module.graph.nodes if node.target is _LOSS]:
        try:
            _rewrite(module, node, tokens, autocast)
            rewritten += 1
        except _Stays as reason:
            reasons.append((reason.node, str(reason)))
    if rewritten:
        module.graph.eliminate_dead_code()
    return rewritten, reasons


def _rewrite(module: fx.GraphModule, loss: fx.Node, tokens: int, autocast: torch.dtype | None) -> None:
    given: dict[str, Any] = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}
    given |= dict(zip(_LOSS_NAMES, loss.args, strict=False)) | loss.kwargs
    _check_form(loss, given, given["target"].meta["val"])
    chain = list(_chain(given["self"]))
    linear = chain.pop()
    _check_writes(linear, loss)
    if (autocast or linear.meta["val"].dtype) is torch.float16:
        raise _Stays(linear, "the head computes in float16, in which a sum over tokens may overflow: use bfloat16")
    graph, words = module.graph, linear.meta["val"].shape[-1]
    hidden, weight, bias = (*_args(linear), None)[:3]
    rows, scale = hidden, 1.0
    with graph.inserting_before(loss):
        for node in reversed(chain):
            rows, scale = _on_rows(graph, node, rows, scale, words, hidden)
        operands = [rows, weight, bias]
        if autocast is not None:
            operands = [each and _like(linear, graph.call_function(aten.to.dtype, (each, autocast))) for each in operands]
        dtype = torch.float32 if autocast is not None else loss.meta["val"].dtype
        needed = [torch.is_grad_enabled() and trains for trains in _trained(module, linear)]
        smoothing, ignored = given["label_smoothing"], given["ignore_index"]
        options = Options(ignored, given["reduction"] == 1, smoothing, scale, dtype, tokens, needed)
        call = _like(linear, graph.call_function(LINEAR_CROSS_ENTROPY, (*operands, given["target"], *options)))
        value = _like(loss, graph.call_function(operator.getitem, (call, 0)))
    loss.replace_all_uses_with(value)


def _check_form(loss: fx.Node, given: dict[str, Any], target: torch.Tensor) -> None:
    if given["weight"] is not None:
        raise _Stays(loss, "the cross entropy has class weights")
    if given["reduction"] not in (1, 2):
        raise _Stays(loss, 'the cross entropy has reduction="none"')
    if target.is_floating_point():
        raise _Stays(loss, "the targets of the cross entropy are probabilities")
    if target.dim() != 1:
        raise _Stays(loss, f"the targets of the cross entropy have {target.dim()} dimensions: flatten them and the logits")


def _check_writes(linear: fx.Node, loss: fx.Node) -> None:
    """Raise `_Stays` if an operation between the two writes to memory that the linear layer reads."""
    read, node = {_memory(operand) for operand in linear.all_input_nodes}, linear.next
    while node is not loss:
        if _writes(node) and _memory(node) in read:
            raise _Stays(node, "the head's input, weight or bias is changed in place after the head has read it")
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
            raise _Stays(node, "the logits are read by other operations than the cross entropy, or returned")
        yield node
        if node.target is _LINEAR:
            return
        source = (*_args(node), None)[0]
        if not isinstance(source, fx.Node) or not _is_on_rows(node) or source.meta["val"].shape[-1] != words:
            raise _Stays(node, f"{node.target} stands between a linear layer and the cross entropy")
        node = source


def _is_on_rows(node: fx.Node) -> bool:
    """Whether an operation on logits [.., words] does the same to each word, and to each row."""
    if node.target is aten.slice.Tensor:
        dims = node.meta["val"].dim()
        return bool((*_args(node), 0)[1] % dims != dims - 1)
    if node.target in _CASTS:  # the operator computes in at least 32 bits, and in no more than the head does
        before = _args(node)[0].meta["val"].dtype
        return node.meta["val"].dtype in (before, torch.promote_types(before, torch.float32))
    return node.target in _VIEWS | _COPIES or (node.target in _SCALES and isinstance(_args(node)[1], int | float))


def _on_rows(
    graph: fx.Graph, node: fx.Node, rows: fx.Node, scale: float, words: Any, hidden: fx.Node
) -> tuple[fx.Node, float]:
    """The head's input after an operation on the rows of the logits, and the factor of the logits."""
    if node.target in _SCALES:
        return rows, _SCALES[node.target](scale, _args(node)[1])
    if node.target in _CASTS:
        return rows, scale
    args = list(_args(node)[1:])
    if node.target in _VIEWS:
        width = hidden.meta["val"].shape[-1]
        args = [[*args[0][:-1], width]]
    target: Any = node.target
    return _like(node, graph.call_function(target, (rows, *args), dict(node.kwargs))), scale


def _args(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def _like(source: fx.Node, node: Any) -> Any:
    """The node with another's place in the model and the user's source, without its value."""
    if isinstance(node, fx.Node):
        node.meta = {name: each for name, each in source.meta.items() if name != "val"}
    return node


def _trained(module: fx.GraphModule, linear: fx.Node) -> list[bool]:
    """Whether the input, weight and bias of a linear layer may need a gradient."""
    found = [True]
    for operand in (*_args(linear)[1:], None)[:2]:
        tensor = operand and operand.op == "get_attr" and operator.attrgetter(operand.target)(module)
        found.append(tensor.requires_grad if isinstance(tensor, torch.Tensor) else operand is not None)
    return found
