"""Read a captured graph from JSON; `format.py` has the contract."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot, pytree
from graphpp._torch.numbers_of_data import DecidedByData
from graphpp._torch.symbols import Symbols
from graphpp.batch.microbatch import TENSOR_LEAF
from graphpp.capture.attributes.numbers import read_update
from graphpp.capture.outputs import Unseen
from graphpp.capture.trace import CapturedGraph
from graphpp.capture.transfer.digest import ModelDigest
from graphpp.capture.transfer.format import FORMAT, MODULES, OF_ITEMS, PLAIN_META, ROLES, dtype_named, registered_class
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.runtime.program import TensorMeta


def read_graph(text: str, device: torch.device, held: ModelDigest) -> CapturedGraph:
    """The graph that `write_graph` wrote, with the objects of this process.

    `device`: replaces the writer's device. `held`: tensors and groups of this process's model and loss. Raises `CaptureError`
    that names an operator, function, class, group or constant that this process lacks.
    """
    data = json.loads(text)
    if data["format"] != FORMAT:
        raise CaptureError(f"a captured graph was written in format {data['format']}, and this graphpp reads {FORMAT}")
    unknown = data["symbols"] is not None or any('"decided"' in each for each in data["values"])
    mode = aot.fake_mode() if unknown else aot.shapes_mode()
    symbols = None if data["symbols"] is None else Symbols.read(data["symbols"], mode)
    reader = _Reader(device, held, mode, DecidedByData(mode), symbols)
    with aot.quick():
        reader.values = [reader.value(json.loads(each)) for each in data["values"]]
        reader.calls = [tuple(json.loads(each)) for each in data["calls"]]
        reader.sources = [json.loads(each) for each in data["sources"]]
        constants = {name: reader.constant(each) for name, each in data["constants"].items()}
        parameters, buffers = (_read_metas(data[kind]) for kind in ("parameters", "buffers"))
        joint = JointGraph(reader.graph(data["graph"]), data["training"], parameters, buffers, constants, symbols)
        spec = None if data["structure"] is None else reader.structure(data["structure"])
        leaves = tuple(reader.leaf(each) for each in data["leaves"])
    verify_joint_graph(joint)
    reasons = data["fixed_because"], data["plain_because"]
    return CapturedGraph(joint, spec, leaves, tuple(map(read_update, data["updates"])), *reasons)


def _read_metas(written: Iterable[Sequence[Any]]) -> dict[str, TensorMeta]:
    return {
        name: TensorMeta(name, tuple(shape), tuple(stride), dtype_named(dtype), requires_grad)
        for name, shape, stride, dtype, requires_grad in written
    }


def _read_role(written: Sequence[Any]) -> Any:
    return ROLES[written[0]](*written[1:])


@dataclass
class _Reader:
    device: torch.device
    held: ModelDigest
    mode: AbstractContextManager[Any]
    decided: DecidedByData
    symbols: Symbols | None = None
    values: Sequence[Any] = ()
    calls: Sequence[tuple[str, ...]] = ()
    sources: Sequence[str] = ()

    def graph(self, written: Sequence[Mapping[str, Any]]) -> fx.GraphModule:
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        modules: dict[str, fx.GraphModule] = {}
        for each in written:
            args = tuple(self.literal(value, nodes) for value in each.get("args", ()))
            kwargs = {name: self.literal(value, nodes) for name, value in each.get("kwargs", {}).items()}
            target: Any = each["target"]
            if each["op"] == "call_function":
                target = self._target(target)
            elif each["op"] == "get_attr":
                modules[target] = self.graph(each["held"])
            node = graph.create_node(each["op"], target, args, kwargs, each["name"])
            assert node.name == each["name"], f"a node was written as {each['name']} and is read as {node.name}"
            node.meta = self._meta(each, node.target)
            if each["op"] == "get_attr":
                node.meta["held"] = modules[target]
            nodes.append(node)
        return aot.graph_module(modules, graph)

    def _meta(self, written: Mapping[str, Any], target: Any) -> dict[str, Any]:
        meta: dict[str, Any] = {key: written[key] for key in PLAIN_META if key in written}
        tables = {"val": self.values, "calls": self.calls, "source": self.sources}
        meta |= {key: table[written[key]] for key, table in tables.items() if key in written}
        if "role" in written:
            meta["role"] = _read_role(written["role"])
        if "roles" in written:
            meta["roles"] = [_read_role(role) for role in written["roles"]]
        if "original_aten" in written:
            meta["original_aten"] = self._target(written["original_aten"])
        elif written["op"] == "call_function":
            meta["original_aten"] = target
        return meta

    def _target(self, name: str) -> Any:
        """The operator or function with this full name."""
        root, *path = name.split(".")
        try:
            if root not in MODULES:
                raise AttributeError(root)
            place: Any = sys.modules[root]
            for at, part in enumerate(path):
                inner = sys.modules.get(".".join([root, *path[: at + 1]]))
                place = inner if inner is not None else getattr(place, part)
        except AttributeError:
            raise CaptureError(
                f"the rank that captured the model uses {name.removeprefix('torch.ops.')}, which this process does not have: "
                "import the code that defines it on every rank, before graphpp.compile."
            ) from None
        return place

    def literal(self, value: Any, nodes: Sequence[fx.Node] = ()) -> Any:
        """An argument, or a leaf of plain data."""
        if isinstance(value, list):
            return [self.literal(each, nodes) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in OF_ITEMS:
            return OF_ITEMS[kind]([self.literal(each, nodes) for each in content])
        if kind == "node":
            return nodes[content]
        return {"group": self._group, "device": self._device, "operator": self._target}[kind](content)

    def _group(self, name: str) -> str:
        if name not in self.held.groups:
            raise CaptureError(f"the rank that captured has a process group {name}, which this rank does not have")
        return self.held.groups[name]

    def _device(self, name: str) -> torch.device:
        return self.device if name == "own" else torch.device(name)

    def value(self, value: Any) -> Any:
        """A node's value, with fake tensors."""
        if isinstance(value, dict) and "tensor" in value:
            return self._fake(*value["tensor"])
        if isinstance(value, dict) and ("tuple" in value or "list" in value):
            ((kind, content),) = value.items()
            return {"tuple": tuple, "list": list}[kind](self.value(each) for each in content)
        symbolic = isinstance(value, dict) and ("symbolic" in value or "decided" in value)
        return self._size(value) if symbolic else self.literal(value)

    def _size(self, written: Any) -> Any:
        if not isinstance(written, dict):
            return written
        if "decided" in written:
            return self.decided.read(*written["decided"])
        assert self.symbols is not None, "a size is symbolic, and the graph has no symbols"
        return self.symbols.read_size(*written["symbolic"])

    def _fake(self, shape: Any, stride: Any, offset: Any, dtype: str, device: str, *flags: bool) -> torch.Tensor:
        grad, is_parameter, conj = flags
        shape, stride, offset = [*map(self._size, shape)], [*map(self._size, stride)], self._size(offset)
        with self.mode:
            if offset:
                reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
                memory = torch.empty(reach if 0 not in shape else offset, dtype=dtype_named(dtype), device=self._device(device))
                fake = memory.as_strided(shape, stride, offset)
            else:
                fake = torch.empty_strided(shape, stride, dtype=dtype_named(dtype), device=self._device(device))
            if conj:
                fake = fake.conj()
        return torch.nn.Parameter(fake, requires_grad=grad) if is_parameter else fake.requires_grad_(grad)

    def constant(self, written: Mapping[str, Any]) -> torch.Tensor:
        """A constant: a tensor of this process's model or loss, or a new tensor."""
        if "held" in written:
            if written["held"] not in self.held.tensors:
                raise CaptureError(f"the rank that captured has a tensor {written['held']}, which this rank does not have")
            return self.held.tensors[written["held"]].detach()
        shape, dtype, device = written["about"]
        tensor = torch.empty(shape, dtype=dtype_named(dtype), device=self._device(device))
        if not tensor.numel():
            return tensor
        numbers = torch.frombuffer(bytearray(base64.b64decode(written["numbers"])), dtype=torch.uint8)
        return tensor.copy_(numbers.view(tensor.dtype).reshape(shape))

    def structure(self, written: Mapping[str, Any]) -> pytree.TreeSpec:
        if "leaf" in written:
            return pytree.leaf_spec()
        children = [self.structure(child) for child in written["children"]]
        return pytree.TreeSpec(self._class(written["class"]), self._context(written["context"]), children)

    def _class(self, name: str) -> type:
        found = registered_class(name)
        if found is None:
            raise CaptureError(f"the model's output has a {name} in it, which is not registered with torch's pytree here")
        return found

    def _context(self, context: Any) -> Any:
        if isinstance(context, list):
            return [self._context(each) for each in context]
        if isinstance(context, dict) and "class" in context:
            return self._class(context["class"])
        if isinstance(context, dict) and "tuple" in context:
            return tuple(self._context(each) for each in context["tuple"])
        return self.literal(context)

    def leaf(self, written: Any) -> Any:
        if isinstance(written, dict) and "unseen" in written:
            return Unseen(written["unseen"])
        return TENSOR_LEAF if written == {"tensor": True} else self.literal(written)
