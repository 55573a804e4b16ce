"""Python names and literals for the values, operators and arguments of a graph.

Contract:
- `PythonNames(graph)` gives every value a unique name that is no keyword and no builtin. Parameters, buffers, inputs, constants
  and the seed have names from their roles (`layers_0_attn_wq_weight`, `args_0`, `seed`), all other values from their nodes.
- The text binds names of operators, devices and process groups once at its head (`PythonNames.head`), so the texts of two ranks
  differ in devices and groups only there.
- The loader binds objects without a Python name, and graphpp's own functions (`PythonNames.bindings`).
"""

from __future__ import annotations

import builtins
import functools
import keyword
import math
import re
import sys
from types import FunctionType
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import SYMBOLIC
from graphpp.runtime import program

_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_RESERVED = frozenset([*keyword.kwlist, *dir(builtins), "torch", "run", "boxed", "take", "ReturningSink"])
_OPERATOR = type(torch.ops.aten.add.Tensor)
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.qscheme)


class PythonNames:
    """Names for values, targets and literals of one graph; each use of a name adds to `head`, `modules` and `bindings`."""

    def __init__(self, graph: fx.Graph) -> None:
        self.values = _value_names(graph)
        self.head: dict[str, str] = {}  # name -> expression
        self.modules: set[str] = set()  # imports besides torch
        self.bindings: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # expression -> name
        self._taken = _RESERVED | set(self.values.values())

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(name for name in self.head if name.startswith("_device_"))

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(name for name in self.head if name.startswith("_group_"))

    def group(self, name: str) -> str:
        """The name in the text of a process group; `name`: its name in this process."""
        return self._at_head(f"_group_{len(self.groups)}", repr(name))

    def target(self, target: Any) -> str:
        full_name = python_name(target)
        if full_name is None:
            return self.bound(target, f"_{target.__name__}" if isinstance(target, FunctionType) else "")
        if "." not in full_name:
            return full_name
        module = full_name.rpartition(".")[0]
        if module in sys.modules and module != "torch":
            self.modules.add(module)
        return self._at_head("_" + re.sub(r"\W+", "_", full_name.removeprefix("torch.ops.")), full_name)

    def literal(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.literal, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self.literal(key)}: {self.literal(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.literal, (value.start, value.stop, value.step)))})"
        return self._scalar(value)

    def bound(self, value: Any, wanted: str = "") -> str:
        """The name in the text of an object that the loader binds; `wanted`, if it is free."""
        for name, other in self.bindings.items():
            if other is value:
                return name
        wanted = re.sub(r"\W+", "_", wanted) or f"_bound_{len(self.bindings)}"
        name = _free(wanted, self._taken | set(self.head) | set(self.bindings))
        self.bindings[name] = value
        return name

    def _scalar(self, value: Any) -> str:
        if isinstance(value, torch.device):
            return self._at_head(f"_device_{len(self.devices)}", f"torch.device({str(value)!r})")
        if isinstance(value, _OPERATOR):
            return self.target(value)
        assert not isinstance(value, SYMBOLIC), f"the number {value} of an operation differs from size to size, and is no input"
        return _plain(value) or self.bound(value)

    def _at_head(self, wanted: str, expression: str) -> str:
        if expression not in self._names:
            name = _free(wanted, self._taken | set(self.head) | set(self.bindings))
            self._names[expression], self.head[name] = name, expression
        return self._names[expression]


def _plain(value: Any) -> str:
    """A number, string or torch constant as a literal; empty for other objects."""
    kind = type(value)  # exact: enums and numpy numbers are instances of int or float too, but their repr is no literal
    if kind is complex:
        return f"complex({_plain(value.real)}, {_plain(value.imag)})"
    if kind is float and not math.isfinite(value):
        return f"float({str(value)!r})"
    if value is None or value is Ellipsis or kind in (bool, int, float, str):
        return repr(value)
    return str(value) if isinstance(value, _TORCH_CONSTANTS) else ""


@functools.cache
def python_name(target: Any) -> str | None:
    """The full Python name of an operator or function, or None if it has none."""
    if isinstance(target, _OPERATOR):
        return functools.reduce(_attribute, str(target).split("."), "torch.ops")
    name, module = getattr(target, "__name__", ""), getattr(target, "__module__", None)
    if name and getattr(torch.ops.higher_order, name, None) is target:
        return f"torch.ops.higher_order.{name}"
    if getattr(builtins, name, None) is target:
        return str(name)
    if module is None or module == "__main__" or module.startswith("graphpp."):
        return None
    for place in ("operator", "torch", module):
        if target is getattr(sys.modules.get(place), name, None):
            return f"{place}.{name}"
    return None


def _attribute(owner: str, name: str) -> str:
    """`owner.name`; by `getattr` for a keyword, as in the operator `aten.random.from`."""
    return f"getattr({owner}, {name!r})" if keyword.iskeyword(name) else f"{owner}.{name}"


def _value_names(graph: fx.Graph) -> dict[fx.Node, str]:
    """One name per value; values named after their nodes choose first."""
    wanted = {node: _wanted(node) for node in graph.nodes if node.op != "output"}
    names: dict[fx.Node, str] = {}
    taken = set(_RESERVED)
    for node in sorted(wanted, key=lambda node: wanted[node] != node.name):
        names[node] = _free(wanted[node], taken)
        taken.add(names[node])
    return names


def _wanted(node: fx.Node) -> str:
    """The wanted name of a value: in a woven graph with the part's prefix, which a node's own name already has."""
    part, wanted = node.meta.get("part"), _plain_name(node)
    return wanted if part is None or wanted == node.name else f"{part.prefix}_{wanted.lstrip('_')}"


def _plain_name(node: fx.Node) -> str:
    match node.meta.get("role"):
        case program.ParameterRows():
            return f"{_name_of(node.meta['role'].fqn, node)}_rows"
        case program.Parameter(text) | program.Buffer(text) | program.Constant(text) | program.Input(text):
            return _name_of(text, node)
        case program.Seed():
            return "seed"
    return node.name


def _name_of(text: str, node: fx.Node) -> str:
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).rstrip("_") or node.name
    return f"_{name}" if name[0].isdigit() else name


def _free(name: str, taken: set[str] | frozenset[str]) -> str:
    while name in taken:
        name += "_"
    return name


def format_value(value: Any) -> str:
    """Dtype and shape of a value, or of each value of a tuple: `f32[8, 16]`."""
    if isinstance(value, torch.Tensor):
        return f"{format_dtype(value.dtype)}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(format_value, value)) + ")"
    return type(value).__name__


def format_dtype(dtype: torch.dtype) -> str:
    return _TYPES.get(dtype, str(dtype).removeprefix("torch."))
