"""Outline regions: runs of a program's operations become regions to compile; equal regions, such as equal layers, share a key.

Contract:
- A region has its own graph. Its inputs are the values that it reads from outside, in order of first use (symbols of symbolic
  sizes first); its results are the values that are read outside. The call empties the list of inputs.
- A region has operations of one layer (`layer(node)`; None: the layer of the operations before it) for which
  `can_compile(node)` is true. Other operations stay in the program, before or after the region. So does a region that gains
  nothing from a compiler.
- A collective of the model ends the region of the operations that it reads. Products of the layer that it does not need, such
  as weight gradients, are the region after it, which can run while values travel.
- `flex_attention` on a GPU is in a region with its bodies, which a compiler fuses. On the CPU it stays in the program: no
  compiler has its backward.
- Regions with equal keys compute the same from the same inputs: `Region.key` is a hash of the operations, their arguments, and
  the shapes, strides, dtypes and devices of the inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp._torch.operators import flex_attention
from graphpp._torch.symbols import SYMBOLIC, symbols_of
from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import is_check, is_tensor, reached
from graphpp.passes.graph.name_sizes import with_symbols
from graphpp.passes.graph.op_costs import Cost, flops
from graphpp.passes.graph.region import Region, RegionCall
from graphpp.passes.graph.stage_graphs import PhaseGraph
from graphpp.passes.stage.gather_layers import is_gather
from graphpp.passes.stage.region_key import graph_key
from graphpp.runtime.program import Buffer, Size

LayerOf = Callable[[fx.Node], str | None]

_OPERATOR = type(torch.ops.aten.add.Tensor)
_BY_STORAGE = (torch.ops.aten.as_strided.default,)  # its offset counts from the start of the input's storage
_PLAIN = (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True)
class OutlinedGraph:
    phase_graph: PhaseGraph
    calls: tuple[RegionCall, ...]


def outline_regions(source: PhaseGraph, layer: LayerOf) -> OutlinedGraph:
    source = with_symbols(source)
    graph, calls = fx.Graph(), list[RegionCall]()
    copies: dict[fx.Node, fx.Node] = {}
    for node in source.graph.find_nodes(op="placeholder"):
        copies[node] = graph.node_copy(node)
    for label, members in group_operations(source.graph, layer):
        if worth_compiling(members):
            title = f"{label or 'operations'} of stage {source.stage} {source.phase.label}"
            region, inputs, results = _region(title, members)
            calls.append(RegionCall(region))
            _call(graph, calls[-1], inputs, results, copies)
        else:
            for node in members:
                copies[node] = graph.node_copy(node, copies.__getitem__)
    end = source.graph.output_node()
    graph.output(fx.node.map_arg(end.args[0], copies.__getitem__)).meta = dict(end.meta)
    graph.lint()
    return OutlinedGraph(replace(source, graph=graph), tuple(calls))


def can_compile(node: fx.Node) -> bool:
    """Whether an operation can be compiled: torch's own, without random numbers; no collective, check or copy of a buffer."""
    if node.target is operator.getitem:
        return can_compile(node.all_input_nodes[0])
    target: Any = node.target
    if flex_attention.is_fused(node):
        return True
    if not isinstance(target, _OPERATOR) or target.namespace not in ("aten", "prims"):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable or target in _BY_STORAGE:
        return False
    if is_collective(node) or is_wait(node) or is_check(node) or _is_copy_of_buffer(node):
        return False
    values = [node.meta["val"], *(source.meta["val"] for source in node.all_input_nodes)]
    plain = all(isinstance(leaf, (*_PLAIN, fx.Node)) for leaf in _leaves([node.args, node.kwargs]))
    return plain and all(map(_is_known, _leaves(values)))


def worth_compiling(members: Sequence[fx.Node]) -> bool:
    """Whether a compiler can gain: by a choice of kernel for a contraction, or by fusing several operations."""
    if not all(map(can_compile, members)):
        return False
    working = [node for node in members if not is_view(node) and node.target is not operator.getitem]
    return len(working) > 1 or any(flops(node) for node in working)


def cost_with_regions(cost: Cost) -> Cost:
    def total(node: fx.Node) -> float:
        if not isinstance(node.target, RegionCall):
            return cost(node)
        return sum(map(cost, node.target.region.graph.nodes))

    return total


@dataclass
class _Open:
    """The open region (`members`), and operations outside of it that must come after it (`late`)."""

    label: str | None = None
    members: list[fx.Node] = field(default_factory=list)
    late: list[fx.Node] = field(default_factory=list)

    def close(self) -> Iterator[tuple[str | None, list[fx.Node]]]:
        sent = [node for node in self.late if is_collective(node) and not is_gather(node)]
        needed = self._needed() if sent else set(self.members)
        rest = [node for node in self.members if node not in needed]
        if not any(map(flops, rest)):
            needed, rest = set(self.members), []
        if needed:
            yield self.label, [node for node in self.members if node in needed]
        yield from ((None, [node]) for node in self.late)
        if rest:
            yield self.label, rest

    def _needed(self) -> set[fx.Node]:
        """The members that later operations read, all that these read, and all items of such tuples."""
        inside = set(self.members)

        def onward(node: fx.Node) -> list[fx.Node]:
            items = [user for user in node.users if user.target is operator.getitem]
            return [other for other in (*node.all_input_nodes, *items) if other in inside]

        return reached((other for node in self.late for other in node.all_input_nodes if other in inside), onward)


def group_operations(graph: fx.Graph, layer: LayerOf) -> Iterator[tuple[str | None, list[fx.Node]]]:
    """The operations in a valid order, as lists with their layer: a region's operations together, each other one alone."""
    now = _Open()
    for node in _with_items(graph):
        reads = set(node.all_input_nodes)
        if can_compile(node):
            label = layer(node) if node.target is not operator.getitem else None  # items go with their tuple
            other = label is not None and now.label is not None and label != now.label
            if other or not reads.isdisjoint(now.late):
                yield from now.close()
                now = _Open(now.label)
            now.label = label if label is not None else now.label
            now.members.append(node)
        elif is_gather(node) and is_wait(node):  # the region before it computes while the layer arrives
            yield from now.close()
            now = _Open(now.label)
            yield None, [node]
        elif reads.isdisjoint(now.members) and reads.isdisjoint(now.late):
            yield None, [node]
        else:
            now.late.append(node)
    yield from now.close()


def _with_items(graph: fx.Graph) -> Iterator[fx.Node]:
    def with_items(node: fx.Node) -> Iterator[fx.Node]:
        yield node
        for user in node.users:
            if user.target is operator.getitem:
                yield from with_items(user)

    for node in graph.nodes:
        body = node.op == "get_attr" and all(map(flex_attention.is_fused, node.users))  # goes with its operator
        if node.op not in ("placeholder", "output") and node.target is not operator.getitem and not body:
            yield from with_items(node)


def _region(title: str, members: Sequence[fx.Node]) -> tuple[Region, list[fx.Node], list[fx.Node]]:
    inside = set(members)
    read = [source for node in members for source in node.all_input_nodes if source not in inside]
    inputs = [source for source in read if source.op != "get_attr"]
    inputs = list(dict.fromkeys([*_symbols_in([*inputs, *members]), *inputs]))
    results = [node for node in members if any(user not in inside for user in node.users) and is_tensor(node)]
    graph = fx.Graph()
    known = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node, copy in known.items():
        copy.meta = {"val": node.meta["val"]}
    for node in [*dict.fromkeys(source for source in read if source.op == "get_attr"), *members]:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in results))
    return Region(title, graph, graph_key(graph)), inputs, results


def _symbols_in(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """The program's inputs that are the symbols of these values: a compiler computes all sizes from them."""
    names: set[str] = set()
    for value in _leaves([node.meta["val"] for node in nodes]):
        sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
        names |= {name for size in sizes for name in symbols_of(size)}
    if not names:
        return []
    roles = {node.meta["role"]: node for node in nodes[0].graph.find_nodes(op="placeholder")}
    return [roles[Size(name)] for name in sorted(names)]


def _call(
    graph: fx.Graph, call: RegionCall, inputs: Iterable[fx.Node], results: Sequence[fx.Node], known: dict[fx.Node, fx.Node]
) -> None:
    node = graph.call_function(call, tuple(known[source] for source in inputs))
    node.meta = {**results[-1].meta, "val": tuple(result.meta["val"] for result in results)}
    for index, result in enumerate(results):
        known[result] = graph.create_node("call_function", operator.getitem, (node, index), {}, result.name)
        known[result].meta = dict(result.meta)


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate(value, found.append)
    return found


def _is_copy_of_buffer(node: fx.Node) -> bool:
    """Whether an operation copies a buffer's old value before a later write; a compiler may drop the copy as a no-op."""
    source = node.args[0] if node.target is torch.ops.aten.clone.default else None
    return isinstance(source, fx.Node) and isinstance(source.meta.get("role"), Buffer)


def _is_known(value: Any) -> bool:
    """Whether compilers handle a value: a strided, real, plain tensor, a size, or None."""
    if has_unknown_size(value):
        return False
    return value is None or isinstance(value, SYMBOLIC) or (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.dtype.is_complex
        and not (value.is_conj() or value.is_neg() or value.is_quantized)
    )
