"""Write a captured graph as JSON and read the graph from JSON.

Contract
--------
- `read(write(captured), ...)` has the same nodes in the same order, with equal names, targets, arguments and metadata: all keys
  that `passes/graph/joint_graph.py` lists, and `original_aten`, from which Inductor names kernels. Values become fake tensors
  of equal shape, strides, offset, dtype and device.
- The text is data: to read it calls no code that the text names. Operators, functions and classes are looked up among those
  that this process has. `CaptureError` says which operator, function or class is missing.
- Objects of one process are written by name and looked up by this name on arrival: a process group by the attribute of the
  model or the loss that holds the group, a constant by the attribute that holds the tensor, the capture's device as "own".
- `write` raises `WriteError` for a graph with an object that has no such name, and for one whose name means another object.
"""

from __future__ import annotations

import base64
import json
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot, pytree
from graphpp.batch.microbatch import TENSOR_LEAF
from graphpp.capture.reachable import Reachable
from graphpp.capture.trace import CapturedGraph
from graphpp.errors import CaptureError
from graphpp.passes.graph.collectives import names_group
from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.text.naming import python_name
from graphpp.runtime import program
from graphpp.runtime.program import TensorMeta

_FORMAT = 1  # raise for every change of the text's meaning: texts of another format are not read
_PLAIN_META = ("backward", "position", "seq", "checkpoint", "kept")  # plain data, written as such
_TABLED_META = ("calls", "source")  # written once for all nodes that share the value
_ROLES = {
    kind.__name__: kind
    for kind in (
        program.Parameter, program.Buffer, program.Constant, program.Input, program.Seed,
        program.Loss, program.Output, program.Metric, program.Gradient, program.BufferUpdate,
    )
}  # fmt: skip
_MODULES = ("builtins", "math", "operator", "torch")  # the roots of the modules whose functions a text may name


_IN_JSON = (type(None), bool, int, float, str)


def _start_stop_step(value: Any) -> list[Any]:
    return [value.start, value.stop, value.step]


def _name_in_torch(value: Any) -> list[str]:
    return [str(value).removeprefix("torch.")]


# values that JSON does not have: the kind under which they are written, and the items of which they are made
_AS_ITEMS: Mapping[type, tuple[str, Callable[[Any], Iterable[Any]]]] = {
    tuple: ("tuple", list),
    torch.Size: ("size", list),
    slice: ("slice", _start_stop_step),
    range: ("range", _start_stop_step),
    complex: ("complex", lambda value: [value.real, value.imag]),
    type(...): ("ellipsis", lambda _: []),
    torch.dtype: ("torch", _name_in_torch),
    torch.layout: ("torch", _name_in_torch),
    torch.memory_format: ("torch", _name_in_torch),
}
_OF_ITEMS: Mapping[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "dict": dict,
    "size": torch.Size,
    "slice": lambda ends: slice(*ends),
    "range": lambda ends: range(*ends),
    "complex": lambda parts: complex(*parts),
    "ellipsis": lambda _: ...,
    "torch": lambda name: getattr(torch, *name),
}


class WriteError(Exception):
    """A graph has an object that cannot be written as data."""


def write(captured: CapturedGraph, device: torch.device, held: Reachable) -> str:
    """The graph as JSON. `device`: the device of the capture. `held`: the objects of model and loss by name.

    Raises `WriteError` if the graph has an object without a name.
    """
    joint = captured.joint
    writer = _Writer(device, held)
    spec = captured.output_spec
    return json.dumps(
        {
            "format": _FORMAT,
            "training": joint.training,
            "parameters": [_written_meta(meta) for meta in joint.parameters.values()],
            "buffers": [_written_meta(meta) for meta in joint.buffers.values()],
            "constants": {name: writer.constant(tensor) for name, tensor in joint.constants.items()},
            "graph": writer.graph(joint.module),
            "values": list(writer.tables["val"]),
            "calls": list(writer.tables["calls"]),
            "sources": list(writer.tables["source"]),
            "structure": None if spec is None else writer.structure(spec),
            "leaves": [writer.leaf(leaf) for leaf in captured.output_leaves],
        },
        separators=(",", ":"),
    )


def read(text: str, device: torch.device, held: Reachable) -> CapturedGraph:
    """The graph that `write` wrote, with the objects of this process.

    `device`: the device of this process in place of the writer's. `held`: the objects of this process's model and loss.
    Raises `CaptureError` that names an operator, class, group or constant that this process lacks.
    """
    data = json.loads(text)
    if data["format"] != _FORMAT:
        raise CaptureError(f"a captured graph was written in format {data['format']}, and this graphpp reads {_FORMAT}")
    reader = _Reader(device, held, aot.fake_mode())
    with aot.quick():
        reader.values = [reader.value(json.loads(each)) for each in data["values"]]
        reader.calls = [tuple(json.loads(each)) for each in data["calls"]]
        reader.sources = [json.loads(each) for each in data["sources"]]
        constants = {name: reader.constant(name, each) for name, each in data["constants"].items()}
        parameters, buffers = (_read_metas(data[kind]) for kind in ("parameters", "buffers"))
        joint = JointGraph(reader.graph(data["graph"]), data["training"], parameters, buffers, constants)
        spec = None if data["structure"] is None else reader.structure(data["structure"])
        leaves = tuple(reader.leaf(each) for each in data["leaves"])
    verify_joint_graph(joint)
    return CapturedGraph(joint, spec, leaves)


def _written_meta(meta: TensorMeta) -> list[Any]:
    return [meta.name, meta.shape, meta.stride, _dtype_name(meta.dtype), meta.requires_grad]


def _read_metas(written: Iterable[Sequence[Any]]) -> dict[str, TensorMeta]:
    return {
        name: TensorMeta(name, tuple(shape), tuple(stride), _dtype(dtype), requires_grad)
        for name, shape, stride, dtype, requires_grad in written
    }


def _written_role(role: Any) -> list[Any]:
    return [type(role).__name__, *astuple(role)]


def _read_role(written: Sequence[Any]) -> Any:
    return _ROLES[written[0]](*written[1:])


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _registered(name: str) -> type | None:
    """The class of this full name in torch's pytree; of several classes with one name none."""
    found = [kind for kind in pytree.registered_classes() if _class_name(kind) == name]
    return found[0] if len(found) == 1 else None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether each element of the tensor has a place of its own in the tensor's memory."""
    sizes = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 1
    for step, size in sizes:
        if step < reach:
            return False
        reach = step * size
    return True


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype), name
    return found


@dataclass
class _Writer:
    """Writes values as JSON; a tuple, a slice, a dtype and the like become a dict with one key, the kind.

    `tables`: values, module calls and source lines that many nodes share, each written once; by text, with their indices.
    """

    device: torch.device
    held: Reachable
    tables: dict[str, dict[str, int]] = field(default_factory=lambda: {"val": {}, "calls": {}, "source": {}})

    def graph(self, module: fx.GraphModule) -> list[dict[str, Any]]:
        """The nodes in order; an argument that is a node is written as the node's index."""
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
        written = {key: meta[key] for key in _PLAIN_META if key in meta}
        written |= {key: self._tabled(key, meta[key]) for key in _TABLED_META if key in meta}
        if "val" in meta:
            written["val"] = self._tabled("val", self.value(meta["val"]))
        if "role" in meta:
            written["role"] = _written_role(meta["role"])
        if "roles" in meta:
            written["roles"] = [_written_role(role) for role in meta["roles"]]
        original = meta.get("original_aten")
        if isinstance(original, aot.Operator) and self._target(original) != self._target(node.target):
            written["original_aten"] = self._target(original)
        return written

    def _tabled(self, key: str, value: Any) -> int:
        table = self.tables[key]
        return table.setdefault(json.dumps(value, separators=(",", ":")), len(table))

    def _target(self, target: Any) -> str:
        if isinstance(target, aot.Operator):
            return f"torch.ops.{'higher_order.' * isinstance(target, aot.HigherOrderOperator)}{target}"
        name = python_name(target)
        if name is None or ("." in name and name.partition(".")[0] not in _MODULES):
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
        kind = type(value)  # exactly: an enum is an instance of int, too
        if kind in _IN_JSON:
            return value
        if kind not in _AS_ITEMS:
            raise WriteError(f"a value of type {kind.__module__}.{kind.__qualname__}")
        name, items = _AS_ITEMS[kind]
        return {name: [self.literal(each, index) for each in items(value)]}

    def _device(self, device: torch.device) -> str:
        """The device; "own" for that of the capture, of which each rank has another one."""
        return "own" if device in (self.device, torch.device(self.device.type)) else str(device)

    def value(self, value: Any) -> Any:
        """The metadata of a node's value."""
        if not isinstance(value, torch.Tensor):
            if type(value) in (list, tuple):
                return {type(value).__name__: [self.value(each) for each in value]}
            return self.literal(value)
        if value.layout is not torch.strided or value.is_neg():
            raise WriteError(f"a value of layout {value.layout}, or with a delayed minus sign")
        shape, stride, offset = list(value.shape), list(value.stride()), value.storage_offset()
        if not all(type(each) is int for each in (*shape, *stride, offset)):
            raise WriteError(f"a size that data decides: {shape}")
        flags = [value.requires_grad, isinstance(value, torch.nn.Parameter), value.is_conj()]
        return {"tensor": [shape, stride, offset, _dtype_name(value.dtype), self._device(value.device), *flags]}

    def constant(self, tensor: torch.Tensor) -> dict[str, Any]:
        """The name under which model or loss hold the tensor; the numbers of a tensor that the forward itself made."""
        name = self.held.name_of_tensor(tensor)
        if name is not None:
            return {"held": name}
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise WriteError(f"a constant of layout {tensor.layout}")
        if type(tensor) is not torch.Tensor or not _is_dense(tensor):
            raise WriteError(f"a constant of type {type(tensor).__name__} and strides {tensor.stride()}")
        values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = base64.b64encode(bytes(values.numpy())).decode()
        about = [list(tensor.shape), list(tensor.stride()), _dtype_name(tensor.dtype), self._device(tensor.device)]
        return {"numbers": data, "about": about}

    def structure(self, spec: pytree.TreeSpec) -> dict[str, Any]:
        """The structure of an output, with classes by their full names."""
        if spec.type is None:
            return {"leaf": True}
        children = [self.structure(child) for child in pytree.children(spec)]
        return {"class": self._class(spec.type), "context": self._context(pytree.context(spec)), "children": children}

    def _context(self, context: Any) -> Any:
        """The plain data by which a class of torch's pytree is put together again."""
        if isinstance(context, type):
            return {"class": self._class(context)}
        if isinstance(context, list):
            return [self._context(each) for each in context]
        if type(context) is tuple:
            return {"tuple": [self._context(each) for each in context]}
        return self.literal(context)

    @staticmethod
    def _class(kind: type) -> str:
        name = _class_name(kind)
        if _registered(name) is not kind:
            raise WriteError(f"the class {name}, whose name means no class or another one in torch's pytree")
        return name

    def leaf(self, leaf: Any) -> Any:
        """A leaf of an output: plain data, or the mark of a tensor."""
        return {"tensor": True} if leaf is TENSOR_LEAF else self.literal(leaf)


@dataclass
class _Reader:
    """Reads values that `_Writer` wrote."""

    device: torch.device
    held: Reachable
    mode: AbstractContextManager[Any]
    values: Sequence[Any] = ()
    calls: Sequence[tuple[str, ...]] = ()
    sources: Sequence[str] = ()

    def graph(self, written: Sequence[Mapping[str, Any]]) -> fx.GraphModule:
        """A module with these nodes."""
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
        meta: dict[str, Any] = {key: written[key] for key in _PLAIN_META if key in written}
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
        """The operator or function of a full name."""
        root, *path = name.split(".")
        try:
            if root not in _MODULES:
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
        if kind in _OF_ITEMS:
            return _OF_ITEMS[kind]([self.literal(each, nodes) for each in content])
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
        """A node's value: fake tensors for the tensors in it."""
        if isinstance(value, dict) and "tensor" in value:
            return self._fake(*value["tensor"])
        if isinstance(value, dict) and ("tuple" in value or "list" in value):
            ((kind, content),) = value.items()
            return {"tuple": tuple, "list": list}[kind](self.value(each) for each in content)
        return self.literal(value)

    def _fake(self, shape: Any, stride: Any, offset: int, dtype: str, device: str, *flags: bool) -> torch.Tensor:
        grad, is_parameter, conj = flags
        with self.mode:
            if offset:
                reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
                memory = torch.empty(reach if 0 not in shape else offset, dtype=_dtype(dtype), device=self._device(device))
                fake = memory.as_strided(shape, stride, offset)
            else:
                fake = torch.empty_strided(shape, stride, dtype=_dtype(dtype), device=self._device(device))
            if conj:
                fake = fake.conj()
        return torch.nn.Parameter(fake, requires_grad=grad) if is_parameter else fake.requires_grad_(grad)

    def constant(self, name: str, written: Mapping[str, Any]) -> torch.Tensor:
        """The constant `name` of this process."""
        if "held" in written:
            if written["held"] not in self.held.tensors:
                raise CaptureError(f"the rank that captured has a tensor {written['held']}, which this rank does not have")
            return self.held.tensors[written["held"]].detach()
        shape, stride, dtype, device = written["about"]
        tensor = torch.empty_strided(shape, stride, dtype=_dtype(dtype), device=self._device(device))
        if not tensor.numel():
            return tensor
        numbers = torch.frombuffer(bytearray(base64.b64decode(written["numbers"])), dtype=torch.uint8)
        return tensor.copy_(numbers.view(tensor.dtype).reshape(shape))

    def structure(self, written: Mapping[str, Any]) -> pytree.TreeSpec:
        """The structure of an output."""
        if "leaf" in written:
            return pytree.leaf_spec()
        children = [self.structure(child) for child in written["children"]]
        return pytree.TreeSpec(self._class(written["class"]), self._context(written["context"]), children)

    def _class(self, name: str) -> type:
        found = _registered(name)
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
        """A leaf of an output."""
        return TENSOR_LEAF if written == {"tensor": True} else self.literal(written)
