"""Data-dependent numbers cross phases as 0-dim tensors.

Contract: afterwards only nodes of the same forward read a number that a node computes. Every other reader (a backward, a later
stage) has its own operation that reads the number from a tensor, so phase graphs share only tensors. A tensor of data-dependent
size stays in its stage: `carry_numbers` raises `CaptureError` if a split lets one cross a boundary. A backward divides numbers
as C++ does, like autograd's formulas: the variance of one row divides by zero.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import divide, fake_number, has_unknown_size
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, describe_node

aten = torch.ops.aten
_DTYPES = {
    torch.SymInt: torch.int64, torch.SymFloat: torch.float64, torch.SymBool: torch.bool,
    int: torch.int64, float: torch.float64, bool: torch.bool,
}  # fmt: skip
_NUMBERS = tuple(_DTYPES)


def has_numbers_of_data(joint: JointGraph) -> bool:
    values = (node.meta["val"] for node in joint.computed())
    return any(isinstance(value, _NUMBERS) or has_unknown_size(value) for value in values)


def carry_numbers(joint: JointGraph) -> JointGraph:
    for node in list(joint.computed()):
        if node.target is operator.truediv and node.meta["backward"]:
            node.target = divide
        if isinstance(node.meta["val"], _NUMBERS):
            readers = [user for user in node.users if not _in_one_program(node, user)]
            if readers:
                _hand_over(joint.graph, node, readers)
    for node in joint.computed():
        if isinstance(node.meta["val"], torch.Tensor) and has_unknown_size(node.meta["val"]):
            _check_readers(node)
    return joint


def _in_one_program(node: fx.Node, reader: fx.Node) -> bool:
    """Whether one program surely has both nodes; a backward may be split in two."""
    of_forward = not node.meta["backward"] and not reader.meta["backward"]
    return of_forward and node.meta["stage"] in (reader.meta["stage"], None)


def _hand_over(graph: fx.Graph, number: fx.Node, readers: list[fx.Node]) -> None:
    value = number.meta["val"]
    if number.target is aten._local_scalar_dense.default:
        tensor: Any = number.args[0]
    else:
        dtype, device = _DTYPES[type(value)], torch.device("cpu")
        with graph.inserting_after(number):
            tensor = graph.call_function(aten.scalar_tensor.default, (number,), {"dtype": dtype, "device": device})
        tensor.meta = {**number.meta, "val": fake_number(dtype, device)}
    for reader in readers:
        with graph.inserting_before(reader):
            own = graph.call_function(aten._local_scalar_dense.default, (tensor,))
        places = {key: reader.meta[key] for key in ("stage", "backward", "position", "calls", "source", "seq")}
        own.meta = {**number.meta, **places}
        reader.replace_input_with(number, own)


def _check_readers(node: fx.Node) -> None:
    for reader in node.users:
        stages = (node.meta["stage"], reader.meta.get("stage"))
        if None not in stages and len(set(stages)) > 1:
            raise CaptureError(
                f"only the data decides the size of the value of {node.target} at {describe_node(node)}, in stage {stages[0]}, "
                f"and {describe_node(reader)} reads the value in stage {stages[1]}: a message has one size. Move the cut so "
                "that both fall into one stage."
            )
