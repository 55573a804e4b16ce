"""Print a graph as Python: the text that runs is the text that is dumped.

Contract
--------
`render(graph)` returns a module text with one function `run(boxed)`: it takes a list of inputs, empties it, and returns a
tuple. Every value is deleted right after its last use, inputs included, so nothing lives longer than it is needed.
Each line carries shape and dtype, the module call and the user's source line as a comment.
Targets are bound once at the head; what has no name in Python (sub-graphs) stands in `Rendered.bindings`.
"""

from __future__ import annotations

import builtins
import keyword
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from graphpp.passes.joint import describe

_TYPES = {
    torch.float32: "f32", torch.float64: "f64", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


@dataclass(frozen=True)
class Rendered:
    """Text of a module with the function `run`, and objects the text names but cannot spell."""

    text: str
    bindings: dict[str, Any]

    def load(self, filename: str) -> Callable[[list[Any]], Sequence[Any]]:
        """Compile the text and return its `run`; `filename` is what tracebacks show."""
        namespace: dict[str, Any] = dict(self.bindings)
        exec(compile(self.text, filename, "exec"), namespace)
        run: Callable[[list[Any]], Sequence[Any]] = namespace["run"]
        return run


class _Names:
    """Python names for nodes and targets; a target's name is bound at the head of the text."""

    def __init__(self) -> None:
        self.targets: dict[str, str] = {}
        self.bindings: dict[str, Any] = {}

    def node(self, node: fx.Node) -> str:
        reserved = keyword.iskeyword(node.name) or hasattr(builtins, node.name) or node.name in ("torch", "run", "boxed")
        return node.name + "_" if reserved else node.name

    def target(self, target: Any) -> str:
        """A short name for an operator, bound to its full name."""
        spelled = spell_target(target)
        name = "_" + spelled.removeprefix("torch.ops.").replace(".", "_")
        if spelled.isidentifier():
            return spelled
        self.targets[name] = spelled
        return name

    def literal(self, value: Any) -> str:
        """An argument as Python text."""
        if isinstance(value, fx.Node):
            return self.node(value)
        if isinstance(value, list | tuple):
            inner = ", ".join(map(self.literal, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self.literal(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({self.literal(value.start)}, {self.literal(value.stop)}, {self.literal(value.step)})"
        return self._scalar(value)

    def _scalar(self, value: Any) -> str:
        if isinstance(value, float) and not math.isfinite(value):
            return f"float({str(value)!r})"
        if isinstance(value, torch.device):
            return f"torch.device({str(value)!r})"
        if value is None or isinstance(value, bool | int | float | complex | str):
            return repr(value)
        if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
            return str(value)
        name = f"_bound_{len(self.bindings)}"
        self.bindings[name] = value
        return name


def spell_target(target: Any) -> str:
    """The full Python name of an operator or function."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        return f"torch.ops.{target}" if "." in str(target) else f"torch.ops.higher_order.{target}"
    module = getattr(target, "__module__", "") or ""
    if target is getattr(operator, target.__name__, None):
        return f"operator.{target.__name__}"
    return f"{module}.{target.__name__}" if module not in ("", "builtins") else str(target.__name__)


def render(graph: fx.Graph, title: str = "") -> Rendered:
    """The graph as a Python module with `run(boxed)`; `title` becomes its docstring."""
    names = _Names()
    body = list(_body(graph, names))
    head = [f'"""{title}"""', "", "import operator", "", "import torch", ""]
    head += [f"{name} = {spelled}" for name, spelled in sorted(names.targets.items())]
    return Rendered("\n".join([*head, "", "", "def run(boxed):", *(f"    {line}" for line in body), ""]), names.bindings)


def _body(graph: fx.Graph, names: _Names) -> list[str]:
    inputs = list(graph.find_nodes(op="placeholder"))
    lines = []
    if inputs:
        lines.append("(")
        lines += [_noted(f"    {names.node(node)},", node) for node in inputs]
        lines += [") = boxed", "boxed.clear()"]
    last_use = _last_uses(graph)
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"return {names.literal(tuple(node.args[0]))}")
        elif node.op != "placeholder":
            lines.append(_noted(_statement(node, names), node))
        dead = [names.node(value) for value in last_use.get(node, ())]
        if dead and node.op != "output":
            lines.append(f"del {', '.join(dead)}")
    return lines


def _statement(node: fx.Node, names: _Names) -> str:
    if node.op == "get_attr":
        return f"{names.node(node)} = {names.literal(node.meta['held'])}"
    if node.target is operator.getitem:
        return f"{names.node(node)} = {names.literal(node.args[0])}[{names.literal(node.args[1])}]"
    args = [names.literal(value) for value in node.args]
    args += [f"{key}={names.literal(value)}" for key, value in node.kwargs.items()]
    return f"{names.node(node)} = {names.target(node.target)}({', '.join(args)})"


def _last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that nobody reads after it."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        unused = [node] if node.op not in ("output",) and node not in seen else []
        ending = [value for value in dict.fromkeys(node.all_input_nodes) if value not in seen]
        seen.update(ending, [node])
        last[node] = ending + unused
    return last


def _noted(line: str, node: fx.Node) -> str:
    role = node.meta.get("role")
    note = f"{role!r}" if node.op == "placeholder" and role is not None else describe(node)
    return f"{line}  # {spell_value(node.meta.get('val'))} {note}"


def spell_value(value: Any) -> str:
    """`f32[8, 16]`, or a tuple of them."""
    if isinstance(value, torch.Tensor):
        return f"{_TYPES.get(value.dtype, str(value.dtype))}{list(value.shape)}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(spell_value, value)) + ")"
    return type(value).__name__
