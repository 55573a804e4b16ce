"""Write a captured graph as JSON; `format.py` has the contract."""

from __future__ import annotations

import base64
import json
import operator
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot, pytree
from graphpp._torch.numbers_of_data import bounds
from graphpp._torch.size_expressions import write_expression
from graphpp._torch.symbols import SYMBOLIC, Symbols, expression, hint, is_unknown
from graphpp.batch.microbatch import TENSOR_LEAF
from graphpp.capture.outputs import Unseen
from graphpp.capture.trace import CapturedGraph
from graphpp.capture.transfer.digest import ModelDigest
from graphpp.capture.transfer.format import (
    AS_ITEMS,
    FORMAT,
    IN_JSON,
    MODULES,
    PLAIN_META,
    TABLED_META,
    class_name,
    dtype_name,
    registered_class,
)
from graphpp.passes.graph.collectives import names_group
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.text.naming import python_name
from graphpp.runtime.program import Constant, TensorMeta

_COPIES = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)  # of tensors made from literals


class WriteError(Exception):
    """A graph has an object that cannot be written as data."""


def write_graph(captured: CapturedGraph, device: torch.device, held: ModelDigest) -> str:
    """The graph as JSON. `device`: the device of the capture. `held`: tensors and groups of model and loss, by name.

    Raises `WriteError` for an object without a name, or whose name means another object.
    """
    joint = captured.joint
    writer = _Writer(device, held)
    spec = captured.output_spec
    return json.dumps(
        {
            "format": FORMAT,
            "training": joint.training,
            "parameters": [_written_meta(meta) for meta in joint.parameters.values()],
            "buffers": [_written_meta(meta) for meta in joint.buffers.values()],
            "symbols": None if joint.symbols is None else _written_symbols(joint.symbols),
            "constants": writer.constants(joint),
            "graph": writer.graph(joint.module),
            "values": list(writer.tables["val"]),
            "calls": list(writer.tables["calls"]),
            "sources": list(writer.tables["source"]),
            "structure": None if spec is None else writer.structure(spec),
            "leaves": [writer.leaf(leaf) for leaf in captured.output_leaves],
            "updates": [update.written() for update in captured.updates],
            "fixed_because": captured.fixed_because,
            "plain_because": captured.plain_because,
        },
        separators=(",", ":"),
    )


def _written_meta(meta: TensorMeta) -> list[Any]:
    return [meta.name, meta.shape, meta.stride, dtype_name(meta.dtype), meta.requires_grad]


def _written_symbols(symbols: Symbols) -> dict[str, Any]:
    try:
        return symbols.written()
    except ValueError as error:
        raise WriteError(str(error)) from None


def _written_size(size: Any) -> Any:
    """An int, or an expression with its value in the trace or, if data-dependent, with the bounds of its symbols."""
    if not isinstance(size, SYMBOLIC):
        return size
    if not expression(size).free_symbols:
        return hint(size)
    if is_unknown(size):
        return {"decided": [type(size).__name__, write_expression(expression(size)), bounds(size)]}
    return {"symbolic": [write_expression(expression(size)), hint(size)]}


def _written_role(role: Any) -> list[Any]:
    return [type(role).__name__, *astuple(role)]


def _is_written_down(tensor: torch.Tensor, node: fx.Node) -> bool:
    """Whether the forward makes a constant from literals in each call, as by `torch.tensor([1, 2])`.

    Torch copies such a tensor by `lift_fresh_copy` before its first use. A library's tensor, whose values may change later, is
    used without a copy, and the memory of a NumPy array is not resizable.
    """
    fresh = all(user.target in _COPIES for user in node.users) and tensor.untyped_storage().resizable()
    return fresh and type(tensor) is torch.Tensor and tensor.is_contiguous()


@dataclass
class _Writer:
    """Writes values as JSON. `tables`: values, module calls and source lines that nodes share: JSON text -> index."""

    device: torch.device
    held: ModelDigest
    tables: dict[str, dict[str, int]] = field(default_factory=lambda: {"val": {}, "calls": {}, "source": {}})

    def graph(self, module: fx.GraphModule) -> list[dict[str, Any]]:
        """The nodes in order; an argument that is a node becomes its index."""
        index: dict[fx.Node, int] = {}
        nodes = []
        for node in module.graph.nodes:
            nodes.append(self._node(node, module, index))
            index[node] = len(index)
        return nodes

    def _node(self, node: fx.Node, module: fx.GraphModule, index: Mapping[fx.Node, int]) -> dict[str, Any]:
        def argument(place: int | str, value: Any) -> Any:
            return self._group(value) if names_group(node, place) else self.literal(value, index)

        written: dict[str, Any] = {"op": node.op, "name": node.name, "target": str(node.target)}
        if node.op == "call_function":
            written["target"] = self._target(node.target)
        elif node.op == "get_attr":
            written["held"] = self._subgraph(node, module)
        elif node.op not in ("placeholder", "output"):
            raise WriteError(f"{node.op} {node.target}")
        if node.args:
            written["args"] = [argument(place, value) for place, value in enumerate(node.args)]
        if node.kwargs:
            written["kwargs"] = {place: argument(place, value) for place, value in node.kwargs.items()}
        return written | self._meta(node)

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        meta = node.meta
        written = {key: meta[key] for key in PLAIN_META if key in meta}
        written |= {key: self._tabled(key, meta[key]) for key in TABLED_META if key in meta}
        if "val" in meta:
            written["val"] = self._tabled("val", self.value(meta["val"]))
        if "role" in meta:
            written["role"] = _written_role(meta["role"])
        if "roles" in meta:
            written["roles"] = [_written_role(role) for role in meta["roles"]]
        original = meta.get("original_aten")
        called = node.op == "call_function" and isinstance(original, aot.Operator)  # the body of an operator has one too
        if called and self._target(original) != self._target(node.target):
            written["original_aten"] = self._target(original)
        return written

    def _tabled(self, key: str, value: Any) -> int:
        table = self.tables[key]
        return table.setdefault(json.dumps(value, separators=(",", ":")), len(table))

    def _target(self, target: Any) -> str:
        if isinstance(target, aot.Operator):
            return f"torch.ops.{'higher_order.' * isinstance(target, aot.HigherOrderOperator)}{target}"
        name = python_name(target)
        if name is None or ("." in name and name.partition(".")[0] not in MODULES):
            raise WriteError(f"the function {getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}")
        return name if "." in name else f"builtins.{name}"

    def _subgraph(self, node: fx.Node, module: fx.GraphModule) -> list[dict[str, Any]]:
        held = node.meta.get("held") or operator.attrgetter(str(node.target))(module)
        if not isinstance(held, fx.GraphModule):
            raise WriteError(f"the attribute {node.target}, a {type(held).__name__}")
        return self.graph(held)

    def _group(self, group: Any) -> dict[str, str]:
        name = str(getattr(group, "group_name", group))
        if name not in self.held.name_of_group:
            raise WriteError(f"the process group {name}, which no attribute of the model or the loss holds")
        return {"group": self.held.name_of_group[name]}

    def literal(self, value: Any, index: Mapping[fx.Node, int] | None = None) -> Any:
        """An argument, or a leaf of plain data."""
        if isinstance(value, fx.Node):
            assert index is not None, f"the node {value} stands outside of a graph"
            return {"node": index[value]}
        if isinstance(value, list):
            return [self.literal(each, index) for each in value]
        if isinstance(value, dict):
            return {"dict": [[self.literal(key, index), self.literal(each, index)] for key, each in value.items()]}
        if isinstance(value, aot.Operator):
            return {"operator": self._target(value)}
        if isinstance(value, torch.device):
            return {"device": self._device(value)}
        return self._plain(value, index)

    def _plain(self, value: Any, index: Mapping[fx.Node, int] | None) -> Any:
        kind = type(value)  # no isinstance: an enum may be an int
        if kind in IN_JSON:
            return value
        if kind not in AS_ITEMS:
            raise WriteError(f"a value of type {kind.__module__}.{kind.__qualname__}")
        name, items = AS_ITEMS[kind]
        return {name: [self.literal(each, index) for each in items(value)]}

    def _device(self, device: torch.device) -> str:
        """The device; "own" for the capture's device, which differs among ranks."""
        return "own" if device in (self.device, torch.device(self.device.type)) else str(device)

    def value(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if type(value) in (list, tuple):
                return {type(value).__name__: [self.value(each) for each in value]}
            return _written_size(value) if isinstance(value, SYMBOLIC) else self.literal(value)
        if value.layout is not torch.strided or value.is_neg():
            raise WriteError(f"a value of layout {value.layout}, or with a delayed minus sign")
        shape, stride, offset = list(value.shape), list(value.stride()), value.storage_offset()
        if any(map(is_unknown, (*shape, *stride, offset))):
            offset = 0  # no pass reads the offset of such a value, and `as_strided` takes no data-dependent sizes
        shape, stride, offset = [*map(_written_size, shape)], [*map(_written_size, stride)], _written_size(offset)
        flags = [value.requires_grad, isinstance(value, torch.nn.Parameter), value.is_conj()]
        return {"tensor": [shape, stride, offset, dtype_name(value.dtype), self._device(value.device), *flags]}

    def constants(self, joint: JointGraph) -> dict[str, dict[str, Any]]:
        """Each constant: its name in model or loss, or its numbers if the forward makes it from literals."""
        roles = {node.meta["role"]: node for node in joint.graph.find_nodes(op="placeholder")}
        return {name: self._constant(tensor, roles[Constant(name)]) for name, tensor in joint.constants.items()}

    def _constant(self, tensor: torch.Tensor, node: fx.Node) -> dict[str, Any]:
        name = self.held.name_of_tensor(tensor)
        if name is not None:
            return {"held": name}
        if not _is_written_down(tensor, node):
            raise WriteError(f"a tensor without a name, read at {next(iter(node.users)).meta['source']}")
        data = base64.b64encode(bytes(tensor.cpu().reshape(-1).view(torch.uint8).numpy())).decode()
        return {"numbers": data, "about": [list(tensor.shape), dtype_name(tensor.dtype), self._device(tensor.device)]}

    def structure(self, spec: pytree.TreeSpec) -> dict[str, Any]:
        if spec.type is None:
            return {"leaf": True}
        children = [self.structure(child) for child in pytree.children(spec)]
        return {"class": self._class(spec.type), "context": self._context(pytree.context(spec)), "children": children}

    def _context(self, context: Any) -> Any:
        """The plain data from which a pytree class is rebuilt."""
        if isinstance(context, type):
            return {"class": self._class(context)}
        if isinstance(context, list):
            return [self._context(each) for each in context]
        if type(context) is tuple:
            return {"tuple": [self._context(each) for each in context]}
        return self.literal(context)

    @staticmethod
    def _class(kind: type) -> str:
        name = class_name(kind)
        if registered_class(name) is not kind:
            raise WriteError(f"the class {name}, whose name means no class or another one in torch's pytree")
        return name

    def leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, Unseen):
            return {"unseen": leaf.kind}
        return {"tensor": True} if leaf is TENSOR_LEAF else self.literal(leaf)
