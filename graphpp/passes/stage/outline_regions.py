"""Outline: runs of a program's operations become regions, to be compiled; equal regions, such as equal layers, have one key.

Contract
--------
- A region is a graph of its own: its inputs are what it reads from outside, parameters among them, in order of first use; its
  results are what is read outside of it. The program calls it (`RegionCall`) with a list that the call empties.
- Operations stand in one region if they belong to one layer (`layer(node)`; None: to whatever stands before it), and if
  `can_compile(node)`: operators of torch itself, without random numbers, collectives, checks, or copies of buffers. What is
  not compiled stays in the program, before or after the region that it stood in where what it reads and who reads it allow.
- A region with too little in it to gain anything stays as it was.
- `Region.key` is a hash of the operations, their arguments, and the shapes, strides, dtypes and devices of the inputs: equal
  keys mean programs that compute the same from the same inputs.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import is_check
from graphpp.passes.graph.op_costs import Cost, flops
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.runtime.program import Buffer

LayerOf = Callable[[fx.Node], str | None]

_OPERATOR = type(torch.ops.aten.add.Tensor)
_BY_STORAGE = (torch.ops.aten.as_strided.default,)  # reads its input's memory from the start of the storage
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class OutlinedGraph:
    """A program's graph with calls of its regions, in order."""

    slot: PhaseGraph
    calls: tuple[RegionCall, ...]


def outline_regions(slot: PhaseGraph, layer: LayerOf) -> OutlinedGraph:
    """The graph of a program, with its regions taken out; `slot` stays as it is."""
    graph, calls = fx.Graph(), list[RegionCall]()
    known: dict[fx.Node, fx.Node] = {}
    for node in slot.graph.find_nodes(op="placeholder"):
        known[node] = graph.node_copy(node)
    for label, members in group_operations(slot.graph, layer):
        if worth_compiling(members):
            title = f"{label or 'operations'} of stage {slot.stage} {slot.phase.label}"
            region, inputs, results = _region(title, members)
            calls.append(RegionCall(region))
            _call(graph, calls[-1], inputs, results, known)
        else:
            for node in members:
                known[node] = graph.node_copy(node, known.__getitem__)
    end = slot.graph.output_node()
    graph.output(fx.node.map_arg(end.args[0], known.__getitem__)).meta = dict(end.meta)
    graph.lint()
    return OutlinedGraph(replace(slot, graph=graph), tuple(calls))


def can_compile(node: fx.Node) -> bool:
    """Whether a compiler may have an operation."""
    if node.target is operator.getitem:
        return can_compile(node.all_input_nodes[0])
    target: Any = node.target
    if not isinstance(target, _OPERATOR) or target.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable or target in _BY_STORAGE:
        return False
    if is_collective(node) or is_wait(node) or is_check(node) or _is_copy_of_buffer(node):
        return False
    values = [node.meta["val"], *(source.meta["val"] for source in node.all_input_nodes)]
    return all(map(_is_plain, _leaves([node.args, node.kwargs]))) and all(map(_is_known, _leaves(values)))


def worth_compiling(members: Sequence[fx.Node]) -> bool:
    """Whether there is a product to choose a kernel for, or several operations to run as one."""
    if not all(map(can_compile, members)):
        return False
    working = [node for node in members if not is_view(node) and node.target is not operator.getitem]
    return len(working) > 1 or any(flops(node) for node in working)


def cost_with_regions(cost: Cost) -> Cost:
    """The cost of an operation, and of a region that of all operations in it."""

    def total(node: fx.Node) -> float:
        if not isinstance(node.target, RegionCall):
            return cost(node)
        return sum(map(cost, node.target.region.graph.nodes))

    return total


# ------------------------------------------------------------------------------------------------------------ grouping


@dataclass
class _Open:
    """The region that is being gathered, and what has to come after it."""

    label: str | None = None
    members: list[fx.Node] = field(default_factory=list)
    late: list[fx.Node] = field(default_factory=list)

    def close(self) -> Iterator[tuple[str | None, list[fx.Node]]]:
        """The region and each operation that comes after it."""
        if self.members:
            yield self.label, self.members
        yield from ((None, [node]) for node in self.late)


def group_operations(graph: fx.Graph, layer: LayerOf) -> Iterator[tuple[str | None, list[fx.Node]]]:
    """The operations in an order that they can run in, those of one region together, all others alone."""
    now = _Open()
    for node in _with_items(graph):
        reads = set(node.all_input_nodes)
        if can_compile(node):
            label = layer(node) if node.target is not operator.getitem else None  # with the tuple, which no region hands out
            other = label is not None and now.label is not None and label != now.label
            if other or not reads.isdisjoint(now.late):
                yield from now.close()
                now = _Open(now.label)
            now.label = label if label is not None else now.label
            now.members.append(node)
        elif reads.isdisjoint(now.members) and reads.isdisjoint(now.late):
            yield None, [node]
        else:
            now.late.append(node)
    yield from now.close()


def _with_items(graph: fx.Graph) -> Iterator[fx.Node]:
    """The operations in order, the items of a tuple right behind it."""

    def with_items(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for user in node.users:
            if user.target is operator.getitem:
                yield from with_items(user)

    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node.target is not operator.getitem:
            yield from with_items(node)


# -------------------------------------------------------------------------------------------------------------- regions


def _region(title: str, members: Sequence[fx.Node]) -> tuple[Region, list[fx.Node], list[fx.Node]]:
    """The region, what it is called with, and which of its values are read outside."""
    inside = set(members)
    inputs = [source for node in members for source in node.all_input_nodes if source not in inside]
    inputs = list(dict.fromkeys(inputs))
    results = [node for node in members if any(user not in inside for user in node.users) and not _is_several(node)]
    graph = fx.Graph()
    known = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node, copy in known.items():
        copy.meta = {"val": node.meta["val"]}
    for node in members:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in results))
    return Region(title, graph, graph_key(graph)), inputs, results


def _call(
    graph: fx.Graph, call: RegionCall, inputs: Iterable[fx.Node], results: Sequence[fx.Node], known: dict[fx.Node, fx.Node]
) -> None:
    """Call a region, and take its results out."""
    node = graph.call_function(call, tuple(known[source] for source in inputs))
    node.meta = {**results[-1].meta, "val": tuple(result.meta["val"] for result in results)}
    for index, result in enumerate(results):
        known[result] = graph.create_node("call_function", operator.getitem, (node, index), {}, result.name)
        known[result].meta = dict(result.meta)


def graph_key(graph: fx.Graph) -> str:
    """A hash of what a graph computes, from what."""
    numbers = {node: f"%{index}" for index, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        if node.op == "placeholder":
            lines.append(f"input {_layout(node.meta['val'])}")
        else:
            lines.append(f"{node.target} {_spelled([node.args, node.kwargs], numbers)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _spelled(value: Any, numbers: dict[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return numbers[value]
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(_spelled(item, numbers) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_spelled(item, numbers)}' for name, item in sorted(value.items()))}}}"
    return repr(value)


def _layout(value: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(value.shape), value.stride(), value.dtype, str(value.device))


def _leaves(value: Any) -> Iterator[Any]:
    """What stands in nested lists, tuples, slices and dicts."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        yield from _leaves(list(value.values()))
    elif isinstance(value, slice):
        yield from (value.start, value.stop, value.step)
    else:
        yield value


def _is_copy_of_buffer(node: fx.Node) -> bool:
    """Whether an operation keeps a buffer's value from being overwritten: a compiler that saw no use in it would lose that."""
    source = node.args[0] if node.target is torch.ops.aten.clone.default else None
    return isinstance(source, fx.Node) and isinstance(source.meta.get("role"), Buffer)


def _is_plain(value: Any) -> bool:
    return isinstance(value, (*_PLAIN, fx.Node))


def _is_known(value: Any) -> bool:
    """A tensor of a kind that compilers know."""
    return value is None or (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.dtype.is_complex
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )


def _is_several(node: fx.Node) -> bool:
    """Whether a value is a tuple, which is read through its items."""
    return not isinstance(node.meta["val"], torch.Tensor)
