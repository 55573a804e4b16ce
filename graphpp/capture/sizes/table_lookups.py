"""Refuse a look-up beyond the rows of a table, where the rows follow from sizes alone: positions of tokens, say.

Contract: `refuse_missing_rows(joint)` raises `CaptureError` where an operation looks up rows that its table does not have, and
the numbers of the rows depend on no input, parameter, buffer or random number. They are computed here; nothing else is. Without
this check a model whose table of positions is too short is captured on tensors without data, and fails when it runs. A model
that computes with its positions (rotary embedding, ALiBi, recurrences) has no such table, and takes any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, describe_node, is_tensor
from graphpp.passes.joint.key_random_ops import draws_random_numbers
from graphpp.runtime import program

aten = torch.ops.aten
_MOST = 2**22  # elements of a value that is computed here
_INTEGERS = (torch.int32, torch.int64)


def refuse_missing_rows(joint: JointGraph) -> None:
    """Raise `CaptureError` for a look-up of a row that its table does not have."""
    known = _Numbers(joint)
    for node in joint.computed():
        for table, dim, indices in () if node.meta["backward"] else _lookups(node):
            rows, most = table.meta["val"].shape[dim], _highest(known.of(indices))
            if type(rows) is int and most >= rows:
                raise CaptureError(
                    f"{describe_node(node)} looks up row {most:,} of {_name(table)}, which has {rows:,} rows. The number of "
                    f"the row follows from the sizes of the example alone, so more than {rows:,} positions are too many for "
                    "this model: take shorter rows (--length), or a model with more positions"
                )


def _highest(numbers: torch.Tensor | None) -> int:
    """How many rows a table has before the furthest one of these, counted from its end where the number is negative."""
    if numbers is None or numbers.dtype not in _INTEGERS or not numbers.numel():
        return -1
    return max(int(numbers.max()), -1 - int(numbers.min()))


def _lookups(node: fx.Node) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """(table, dimension, numbers of the rows) of an operation."""
    args = node.args
    if node.target is aten.embedding.default:
        yield args[0], 0, args[1]  # type: ignore[misc]
    elif node.target is aten.index_select.default:
        yield args[0], args[1], args[2]  # type: ignore[misc]
    elif node.target is aten.index.Tensor:
        yield from ((args[0], dim, each) for dim, each in enumerate(args[1]) if each is not None)  # type: ignore[misc,arg-type]


def _name(table: fx.Node) -> str:
    role = table.meta.get("role")
    return str(role.fqn) if isinstance(role, program.Parameter | program.Buffer) else f"a table {describe_node(table)}"


class _Numbers:
    """The values of a graph that follow from sizes and constants alone; each is computed once."""

    def __init__(self, joint: JointGraph) -> None:
        self._constants, self._known = joint.constants, dict[fx.Node, torch.Tensor | None]()

    def of(self, node: fx.Node) -> torch.Tensor | None:
        """The value of a node; None where it depends on anything else, or is large."""
        pending = [node]
        while pending:
            each = pending[-1]
            lacking = [source for source in each.all_input_nodes if source not in self._known]
            if each not in self._known and lacking and self._may_compute(each):
                pending += lacking
                continue
            pending.pop()
            if each not in self._known:
                self._known[each] = self._value(each)
        return self._known[node]

    @staticmethod
    def _may_compute(node: fx.Node) -> bool:
        own = getattr(node.target, "namespace", "") in ("aten", "prims")
        random = draws_random_numbers(node.target, node.args, node.kwargs)
        return node.op == "call_function" and own and not random and is_tensor(node) and _is_small(node.meta["val"])

    def _value(self, node: fx.Node) -> torch.Tensor | None:
        role = node.meta.get("role")
        if isinstance(role, program.Constant):
            return self._constants[role.name].detach().cpu() if self._constants[role.name].device.type != "meta" else None
        if not self._may_compute(node) or any(self._known[source] is None for source in node.all_input_nodes):
            return None
        take: Mapping[fx.Node, Any] = self._known
        args = fx.node.map_arg(node.args, take.__getitem__)
        kwargs = dict(fx.node.map_arg(node.kwargs, take.__getitem__))
        kwargs |= {"device": torch.device("cpu")} if "device" in kwargs else {}
        try:
            found = node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, NotImplementedError):  # sizes that are open, operators of the device alone
            return None
        return found if isinstance(found, torch.Tensor) and found.device.type == "cpu" else None


def _is_small(value: torch.Tensor) -> bool:
    return all(type(size) is int for size in value.shape) and value.numel() <= _MOST
