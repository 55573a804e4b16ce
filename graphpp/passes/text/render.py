"""Render a graph as Python: dumps show the text that runs.

Contract: `render(graph)` returns the text of a module with one function `run(boxed)`. It takes a list of inputs, empties it,
and returns a tuple. Every value, including inputs, is deleted right after its last use. A region (`outline_regions.py`) is
called with a list that the region empties, so that it frees its inputs in the same way.

With gradients among the results, the function is `run(boxed, take)`. Each gradient goes to `take(index, value)` as soon as no
other operation reads it, and the tuple has the return value of `take` in its place (by default the gradient). So the runtime
can accumulate a gradient while it is in the cache, and free it. For a gradient that is a node `deferred_matmul(a, b)`,
`take.matmul(index, a, b)` gets the factors; then the text includes a class for the default `take`, which multiplies.

Each line has a comment: dtype and shape, module call, the user's source line; the role of an input or a result; the stage, if
the graph has several; the part of a woven graph. Names come from `naming.py`.
"""

from __future__ import annotations

import inspect
import itertools
import keyword
import linecache
import operator
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from types import FunctionType
from typing import Any

from torch import fx

from graphpp.passes.graph.collectives import group_of, names_group
from graphpp.passes.graph.joint_graph import describe_node
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.text.naming import PythonNames, format_value
from graphpp.runtime import program
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul
from graphpp.runtime.gradients.gradient_sink import ReturningSink
from graphpp.runtime.program import InputRole, OutputRole

_TAKE = ", take=lambda index, value: value"
_TAKE_PRODUCTS = ", take=ReturningSink()"

Run = Callable[..., Sequence[Any]]


@dataclass(frozen=True)
class RenderedGraph:
    """The text of a module with `run`; the objects to bind before it runs; the names of devices and groups at its head."""

    text: str
    bindings: dict[str, Any]
    devices: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()

    def load(self, filename: str) -> Run:
        """Compile the text and return its `run`; tracebacks show `filename` (numbered if taken) and the line."""
        filename = _shown(filename, self.text)
        namespace: dict[str, Any] = dict(self.bindings)
        exec(compile(self.text, filename, "exec"), namespace)
        run: Run = namespace["run"]
        weakref.finalize(run, linecache.cache.pop, filename, None).atexit = False
        return run


def _shown(filename: str, text: str) -> str:
    """Register `text` for tracebacks under `filename`, numbered if another text has that name; return the name."""
    numbered = (filename if number == 1 else f"{filename} {number}" for number in itertools.count(1))
    free = next(name for name in numbered if name not in linecache.cache)
    linecache.cache[free] = (len(text), None, text.splitlines(keepends=True), free)
    return free


def render(graph: fx.Graph, title: str = "") -> RenderedGraph:
    names = PythonNames(graph)
    taken = _gradients_to_take(graph)
    body = list(_body(graph, names, taken))
    head = [docstring(title), "", *(f"import {module}" for module in sorted(names.modules | {"torch"})), ""]
    head += [f"{name} = {expression}" for name, expression in sorted(names.head.items())]
    products = any(_is_product(node, taken) for node in graph.nodes)
    roles = graph.output_node().meta.get("roles") or ()
    default = _TAKE_PRODUCTS if products else _TAKE * any(isinstance(role, program.Gradient) for role in roles)
    parts = ["\n".join(head).rstrip(), *[inspect.getsource(ReturningSink).rstrip()] * products]
    text = "\n\n\n".join([*parts, "\n    ".join([f"def run(boxed{default}):", *body])]) + "\n"
    return RenderedGraph(text, names.bindings, names.devices, names.groups)


def docstring(text: str) -> str:
    return '"""' + text.replace("\\", "\\\\").replace('"""', "'''") + '"""'


def code(text: str) -> str:
    """The rendered text without the module's docstring."""
    return text.partition('"""')[2].partition('"""')[2].lstrip("\n")


def define(name: str, value: Any) -> str:
    """Python that defines `name` as a bound sub-graph or function of graphpp. Raises `TypeError` for other objects."""
    if isinstance(value, fx.GraphModule):
        return _subgraph(name, value)
    if isinstance(value, FunctionType) and value.__module__.startswith("graphpp."):
        return "\n\n\n".join([*_sources(value), f"{name} = {value.__name__}"])
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _subgraph(name: str, module: fx.GraphModule) -> str:
    """The sub-graph of a higher-order operator as a function, with its own sub-graphs as inner functions."""
    names = PythonNames(module.graph)
    lines = [_statement(node, names) for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    result = names.literal(module.graph.output_node().args[0])
    inner = [line for bound, value in names.bindings.items() for line in define(bound, value).splitlines()]
    head = [f"{bound} = {expression}" for bound, expression in names.head.items()]
    arguments = ", ".join(names.values[node] for node in module.graph.find_nodes(op="placeholder"))
    imports = [f"import {item}" for item in sorted(names.modules)]
    return "\n    ".join([f"def {name}({arguments}):", *imports, *head, *inner, *lines, f"return {result}"])


def _sources(function: FunctionType) -> list[str]:
    """The source of a function, and of the functions and numbers that it uses from its own module."""
    texts: dict[str, str] = {}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, int):
            texts.setdefault(name, f"{name} = {value!r}")
        if isinstance(value, FunctionType) and value.__module__ == function.__module__ and name not in texts:
            texts[name] = inspect.getsource(value).rstrip()
            for used in value.__code__.co_names:
                visit(used, value.__globals__.get(used))

    visit(function.__name__, function)
    return list(texts.values())


def _gradients_to_take(graph: fx.Graph) -> dict[fx.Node, int]:
    """The gradients to pass to `take`, with their indices among the results; a gradient that is two results is returned."""
    end = graph.output_node()
    results: Sequence[fx.Node] = end.args[0]  # type: ignore[assignment]
    pairs = zip(results, end.meta.get("roles") or (), strict=False)
    gradients = {node: index for index, (node, role) in enumerate(pairs) if isinstance(role, program.Gradient)}
    return {node: index for node, index in gradients.items() if results.count(node) == 1}


def _is_product(node: fx.Node, taken: Mapping[fx.Node, int]) -> bool:
    return node.target is deferred_matmul and node in taken


def _body(graph: fx.Graph, names: PythonNames, taken: Mapping[fx.Node, int]) -> Iterable[str]:
    notes = _Notes(graph)
    inputs = list(graph.find_nodes(op="placeholder"))
    last_use = _last_uses(graph, taken)
    if inputs:
        yield "("
        yield from (f"    {names.values[node]},{notes.value(node)}" for node in inputs)
        yield from (") = boxed", "boxed.clear()")
    for node in graph.nodes:
        ending = last_use.get(node, [])
        dead = ", ".join(names.values[value] for value in ending if value not in taken)
        if node.op == "output":
            yield from _return(node, names)
        elif isinstance(node.target, RegionCall):
            yield from _region_call(node, names, [value for value in ending if value not in taken], notes)
        elif node.op != "placeholder":
            line = _statement(node, names)
            if _is_product(node, taken):
                line = f"{names.values[node]} = take.matmul({', '.join([str(taken[node]), *map(names.literal, node.args)])})"
            yield f"{line}{f'; del {dead}' * bool(dead)}{notes.value(node)}"
        elif dead:
            yield f"del {dead}"
        for value in (value for value in ending if value in taken and not _is_product(value, taken)):
            yield f"{names.values[value]} = take({taken[value]}, {names.values[value]})"


def _region_call(node: fx.Node, names: PythonNames, ending: Sequence[fx.Node], notes: _Notes) -> Iterable[str]:
    """Call a region with a list of its inputs; values without a later reader are deleted before the call."""
    name, dead = names.values[node], ", ".join(names.values[value] for value in ending if value is not node)
    yield f"{name} = {names.literal(list(node.args))}{f'; del {dead}' * bool(dead)}"
    call: RegionCall = node.target  # type: ignore[assignment]
    yield f"{name} = {names.bound(call.run or call, '_region')}({name}){f'; del {name}' * (node in ending)}{notes.value(node)}"


def _statement(node: fx.Node, names: PythonNames) -> str:
    name = names.values[node]
    if node.op == "get_attr":
        return f"{name} = {names.bound(attribute_of(node), f'_{name}')}"
    if node.op != "call_function":
        raise TypeError(f"{node.op} {node.target}")
    if node.target is operator.getitem:
        return f"{name} = {names.literal(node.args[0])}[{names.literal(node.args[1])}]"
    # Some arguments of aten operators have the name `from`.
    odd = {key: value for key, value in node.kwargs.items() if not key.isidentifier() or keyword.iskeyword(key)}
    args = [_argument(node, index, value, names) for index, value in enumerate(node.args)]
    args += [f"{key}={_argument(node, key, value, names)}" for key, value in node.kwargs.items() if key not in odd]
    args += [f"**{names.literal(odd)}"] * bool(odd)
    return f"{name} = {names.target(node.target)}({', '.join(args)})"


def _argument(node: fx.Node, place: int | str, value: Any, names: PythonNames) -> str:
    return names.group(group_of(node)) if names_group(node, place) else names.literal(value)


def attribute_of(node: fx.Node) -> Any:
    if "held" in node.meta:
        return node.meta["held"]
    return operator.attrgetter(str(node.target))(node.graph.owning_module)


def _return(node: fx.Node, names: PythonNames) -> Iterable[str]:
    results = [names.literal(value) for value in node.args[0]]  # type: ignore[union-attr]
    roles = node.meta.get("roles") or [None] * len(results)
    if not results:
        yield "return ()"
        return
    yield "return ("
    for result, role in zip(results, roles, strict=True):
        yield f"    {result},{_comment('' if role is None else format_role(role))}"
    yield ")"


def _last_uses(graph: fx.Graph, taken: Mapping[fx.Node, int]) -> dict[fx.Node, list[fx.Node]]:
    """For each node, the values that it reads last; the output does not count as a reader of a gradient passed to `take`."""
    seen: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(graph.nodes):
        unused = [node] if node.op != "output" and node not in seen else []
        read = [value for value in dict.fromkeys(node.all_input_nodes) if node.op != "output" or value not in taken]
        ending = [value for value in read if value not in seen]
        seen.update(ending)
        last[node] = ending + unused
    return last


class _Notes:
    def __init__(self, graph: fx.Graph) -> None:
        stages = {node.meta.get("stage") for node in graph.nodes if node.op != "placeholder"} - {None}
        self.many_stages = len(stages) > 1

    def value(self, node: fx.Node) -> str:
        """`f32[8, 16] parameter layers.0.wq.weight`, `f32[8, 16] stage 1 in layers.0 (model.py:41)`."""
        words = [format_value(node.meta["val"])] if node.meta.get("val") is not None else []
        match node.meta.get("role"):
            case None:
                words += [*self._stage(node), *["recomputed"] * ("recomputed" in node.meta), "in", describe_node(node)]
            case program.Received() | program.Saved() as role:
                words += [*self._part(node), f"{format_role(role)}, from", describe_node(node)]
            case role:
                words += [*self._part(node), format_role(role)]
        return _comment(" ".join(words))

    def _part(self, node: fx.Node) -> list[str]:
        """The part of a line in a woven graph: `stage 0 forward,`."""
        return [f"{node.meta['part'].title},"] if "part" in node.meta else []

    def _stage(self, node: fx.Node) -> list[str]:
        """The stage of a line, if the graph has several; a value without a stage is computed in every stage that reads it."""
        if "part" in node.meta or not self.many_stages:
            return self._part(node)
        return ["any stage" if node.meta["stage"] is None else f"stage {node.meta['stage']}"]


def format_role(role: InputRole | OutputRole) -> str:
    """A role in words: `gradient of layers.0.wq.weight`."""
    match role:
        case program.Gradient(fqn):
            return f"gradient of {fqn}"
        case program.BufferUpdate(fqn):
            return f"new value of {fqn}"
        case program.Received() | program.Saved() | program.Sent():
            return type(role).__name__.lower()
        case program.StepInvariant(name):
            return f"hoisted {name}"
    kind = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(role).__name__).lower()
    return " ".join([kind, *(str(getattr(role, item.name)) for item in fields(role))])


def _comment(text: str) -> str:
    return f"  # {text}" if text else ""
