"""Gather sharded parameters layer by layer: a program holds at most two whole layers, the computing one and the next.

Contract: each phase graph reads a rank's rows of its parameters (`ParameterRows`) and gathers the whole ones itself. The
parameters whose first reader is in one layer (`layer_of`) are gathered in one call per group of ranks that shares them (experts
have their own group). The wait stands before the layer's first operation. The next layer's gather starts right after that wait
and after the last reader of the previous layer, so it overlaps with the layer's computation, and no third layer is whole.
Values computed from parameters alone (views, casts) stand right before their first reader.

No whole parameter lives from one program to the next. 0-dim and empty parameters are whole on every rank, and stay inputs.
`PhaseGraph.layers` has the gathers, and per layer the gradients that are summed over the ranks together. Raises `CaptureError`
if a view of a whole parameter would be saved, or sent to another stage.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx

from graphpp.errors import CaptureError
from graphpp.passes.graph.aliases import is_view, root
from graphpp.passes.graph.joint_graph import JointGraph, describe_node, reached, results_of
from graphpp.passes.graph.stage_graphs import PhaseGraph, StagedGraphs
from graphpp.runtime.program import Gradient, LayerTraffic, Parameter, ParameterRows, Saved, Sent

LayerName = Callable[[fx.Node], str | None]

_GATHER = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
_WAIT = torch.ops._c10d_functional.wait_tensor.default
_SENT_AS_THEY_ARE = (torch.float32, torch.float64, torch.float16, torch.bfloat16)  # other dtypes are sent as bytes, for gloo


class RankGroup(NamedTuple):
    """A process group: its name in this process, and the number of its ranks."""

    name: str
    ranks: int


@dataclass(frozen=True)
class ShardedLayers:
    """How parameters are sharded over the ranks of the process group `group`.

    `others`: the groups of parameters that other ranks share, by FQN (experts). `dtypes`: of the rows of each parameter, by
    FQN; `of_messages`: the dtype in which a gradient is sent, from its own dtype; `layer_of`: the layer or module call of an
    operation; None for an operation of no module.
    """

    group: str
    ranks: int
    dtypes: Mapping[str, torch.dtype]
    of_messages: Callable[[torch.dtype], torch.dtype]
    layer_of: LayerName
    others: Mapping[str, RankGroup] = field(default_factory=dict)

    def group_of(self, fqn: str) -> RankGroup:
        return self.others.get(fqn) or RankGroup(self.group, self.ranks)


def gather_layers(staged: StagedGraphs, sharded: ShardedLayers) -> StagedGraphs:
    return replace(staged, graphs={key: _gathering(each, sharded) for key, each in staged.graphs.items()})


def follows_parameters(joint: JointGraph) -> frozenset[str]:
    """The names of the step-invariant values that depend on a parameter, which no program keeps for another one."""
    parameters = [node for role, node in joint.inputs().items() if isinstance(role, Parameter)]
    following = reached(parameters, lambda node: [user for user in node.users if user.meta.get("step_invariant")])
    return frozenset(node.name for node in following if node.op != "placeholder")


def is_gather(node: fx.Node) -> bool:
    return "gathers" in node.meta


def in_order(graph: fx.Graph, layers: LayerTraffic | None) -> LayerTraffic | None:
    """`layers` with the order in which the program of `graph` starts gathers and gradient sums."""
    if layers is None:
        return None
    end, at = graph.output_node(), {node: place for place, node in enumerate(graph.nodes)}
    several = Counter(node for _, node in results_of(graph))
    handed: dict[str, int] = {}  # the position of the last reader of each gradient
    for role, node in results_of(graph):
        if isinstance(role, Gradient):
            readers = [at[user] for user in node.users if user is not end]
            handed[role.fqn] = at[end] if several[node] > 1 else max([at[node], *readers])
    events = [(at[node], f"gather {' '.join(node.meta['fqns'])}") for node in graph.nodes if "fqns" in node.meta]
    events += [(max(handed[fqn] for fqn in fqns), f"reduce {' '.join(fqns)}") for fqns in layers.gradients]
    return replace(layers, order=tuple(line for _, line in sorted(events)))


@dataclass
class _Layer:
    """Parameters that are gathered together; the operations at positions `first` to `last` read them."""

    name: str
    parameters: list[fx.Node] = field(default_factory=list)
    first: int = 0
    last: int = 0


def _gathering(source: PhaseGraph, sharded: ShardedLayers) -> PhaseGraph:
    parameters = [node for node in source.graph.find_nodes(op="placeholder") if _is_sharded(node)]
    order = _derived_late(source.graph, set(parameters))
    layers = _layers(parameters, order, source.graph.output_node(), sharded.layer_of)
    graph = _Copy(source, sharded).copied(order, layers)
    inputs = tuple(node.meta["role"] for node in graph.find_nodes(op="placeholder"))
    _check(source, graph)
    gradients = _gradients(source, sharded)
    gathers = [node for node in graph.nodes if node.target is _GATHER and is_gather(node)]
    traffic = LayerTraffic(
        gathers=tuple(node.meta["gathers"] for node in gathers),
        whole=_most_whole(graph),
        gradients=tuple(tuple(each.fqns) for each in gradients),
        sums=tuple(each.nbytes for each in gradients),
        reductions=tuple(each.sent for each in gradients),
        sent=sum(node.meta["sent"] for node in gathers) + sum((each.ranks - 1) * each.sent / each.ranks for each in gradients),
    )
    return replace(source, graph=graph, inputs=inputs, layers=traffic)


def _is_sharded(node: fx.Node) -> bool:
    value = node.meta["val"]
    return isinstance(node.meta["role"], Parameter) and value.dim() > 0 and value.numel() > 0


def _derived_late(graph: fx.Graph, parameters: set[fx.Node]) -> list[fx.Node]:
    """The operations in order, but with views and casts of parameters right before their first reader."""
    derived: set[fx.Node] = set()
    for node in graph.nodes:
        alone = node.meta.get("step_invariant") or is_view(node) or node.target is operator.getitem
        if node.op == "call_function" and alone and any(each in parameters or each in derived for each in node.all_input_nodes):
            derived.add(node)
    placed: dict[fx.Node, None] = {}

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source in derived and source not in placed:
                place(source)
        placed[node] = None

    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and node not in derived:
            place(node)
    for node in graph.nodes:
        if node in derived and node not in placed:
            place(node)
    return list(placed)


def _layers(parameters: Sequence[fx.Node], order: Sequence[fx.Node], end: fx.Node, layer_of: LayerName) -> list[_Layer]:
    reads: dict[fx.Node, list[int]] = defaultdict(list)
    for at, node in enumerate([*order, end]):
        for source in node.all_input_nodes:
            reads[root(source)].append(at)
    found: dict[str, _Layer] = {}
    for parameter in parameters:
        first, last = reads[parameter][0], reads[parameter][-1]
        reader = next((order[at] for at in reads[parameter] if at < len(order) and layer_of(order[at]) is not None), None)
        name = (layer_of(reader) if reader is not None else None) or parameter.name
        layer = found.setdefault(name, _Layer(name, [], first, last))
        layer.parameters.append(parameter)
        layer.first, layer.last = min(layer.first, first), max(layer.last, last)
    for layer in found.values():  # all operations of a layer in a row are compiled as one region
        while layer.first and layer_of(order[layer.first - 1]) == layer.name:
            layer.first -= 1
    return sorted(found.values(), key=lambda layer: layer.first)


def _starts(layers: Sequence[_Layer]) -> Iterator[tuple[int, int, bool, _Layer]]:
    """(position, number of the layer, whether it is the wait, the layer) of the start and the wait of each gather."""
    for number, layer in enumerate(layers):
        start = 0 if number == 0 else layers[number - 1].first
        if number > 1:
            start = max(start, layers[number - 2].last + 1)
        yield min(start, layer.first), number, False, layer
        yield layer.first, number, True, layer


class _Copy:
    def __init__(self, source: PhaseGraph, sharded: ShardedLayers) -> None:
        self._source, self._sharded = source, sharded
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._items: dict[fx.Node, fx.Node] = {}  # parameter -> its item of a gather's result

    def copied(self, order: Sequence[fx.Node], layers: Sequence[_Layer]) -> fx.Graph:
        graph, gathered = self._graph, {each for layer in layers for each in layer.parameters}
        for node in self._source.graph.find_nodes(op="placeholder"):
            self._copies[node] = self._rows(node) if node in gathered else graph.node_copy(node)
        events = sorted(_starts(layers), key=lambda each: each[:3])
        for at, node in enumerate([*order, None]):
            while events and events[0][0] == at:
                *_, waits, layer = events.pop(0)
                reader = order[min(layer.first, len(order) - 1)] if order else layer.parameters[0]
                (self._wait if waits else self._start)(layer, reader)
            if node is not None:
                self._copies[node] = graph.node_copy(node, self._copies.__getitem__)
        end = self._source.graph.output_node()
        graph.output(fx.node.map_arg(end.args[0], self._copies.__getitem__)).meta = dict(end.meta)
        graph.lint()
        return graph

    def _rows(self, parameter: fx.Node) -> fx.Node:
        """The input with a rank's rows of a parameter: as many rows as the first rank has."""
        fqn, whole = parameter.meta["role"].fqn, parameter.meta["val"]
        node = self._graph.placeholder(f"{parameter.name}_rows")
        elements = -(-whole.shape[0] // self._sharded.group_of(fqn).ranks) * (whole.numel() // whole.shape[0])
        rows = whole.new_empty(elements, dtype=self._sharded.dtypes[fqn])
        node.meta = {**parameter.meta, "val": rows, "role": ParameterRows(fqn)}
        return node

    def _start(self, layer: _Layer, reader: fx.Node) -> None:
        by_group: dict[RankGroup, list[fx.Node]] = defaultdict(list)
        for parameter in layer.parameters:
            by_group[self._sharded.group_of(parameter.meta["role"].fqn)].append(parameter)
        for group, parameters in by_group.items():
            sent = [self._sent(parameter, reader) for parameter in parameters]
            nbytes = sum(each.meta["val"].nbytes for each in sent)
            values = [each.meta["val"].new_empty(group.ranks * each.meta["val"].numel()) for each in sent]
            gather = self._call(reader, values, _GATHER, sent, group.ranks, group.name)
            fqns = [parameter.meta["role"].fqn for parameter in parameters]
            gather.meta |= {"gathers": nbytes, "fqns": fqns, "sent": (group.ranks - 1) * nbytes}
            for index, (parameter, value) in enumerate(zip(parameters, values, strict=True)):
                self._items[parameter] = self._call(reader, value, operator.getitem, gather, index)
                self._items[parameter].meta["gathers"] = nbytes

    def _sent(self, parameter: fx.Node, reader: fx.Node) -> fx.Node:
        """This rank's rows in the dtype of the whole parameter, in which they are sent."""
        rows, dtype = self._copies[parameter], parameter.meta["val"].dtype
        if rows.meta["val"].dtype != dtype:
            rows = self._call(reader, rows.meta["val"].to(dtype), torch.ops.aten._to_copy.default, rows, dtype=dtype)
        if dtype not in _SENT_AS_THEY_ARE:
            rows = self._viewed(reader, rows, torch.uint8)
        return rows

    def _wait(self, layer: _Layer, reader: fx.Node) -> None:
        """Wait for a layer, and view its whole parameters in the memory of the gather."""
        for parameter in layer.parameters:
            item, whole = self._items.pop(parameter), parameter.meta["val"]
            arrived = self._call(reader, item.meta["val"], _WAIT, item)
            arrived.meta["gathers"] = 0
            if whole.dtype not in _SENT_AS_THEY_ARE:
                arrived = self._viewed(reader, arrived, whole.dtype)
            name = f"{parameter.name}_whole"
            shape, stride = list(whole.shape), list(whole.stride())
            made = self._call(reader, whole.detach(), torch.ops.aten.as_strided.default, arrived, shape, stride, 0, name=name)
            self._copies[parameter] = made

    def _viewed(self, reader: fx.Node, value: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self._call(reader, value.meta["val"].view(dtype), torch.ops.aten.view.dtype, value, dtype)

    def _call(self, reader: fx.Node, value: Any, target: Any, *args: Any, name: str | None = None, **kwargs: Any) -> fx.Node:
        node = self._graph.create_node("call_function", target, args, kwargs, name)
        kept = ("stage", "backward", "position", "calls", "source", "seq")
        node.meta = {**{key: reader.meta[key] for key in kept if key in reader.meta}, "val": value}
        return node


def _check(source: PhaseGraph, graph: fx.Graph) -> None:
    """Raise `CaptureError` if a saved or sent result would keep the memory of a gathered parameter alive."""
    for role, node in results_of(graph):
        if isinstance(role, Saved | Sent) and is_gather(root(node)):
            raise CaptureError(
                f"parallel.keep=0: stage {source.stage} would keep a whole parameter for "
                f"{'its backward' if isinstance(role, Saved) else 'another stage'}, by the view {role.name} of it in "
                f"{describe_node(node)}: compute this value where it is read, or take keep=1"
            )


def _most_whole(graph: fx.Graph) -> int:
    last: dict[fx.Node, fx.Node] = {}  # item of a gather -> its last reader
    for node in graph.nodes:
        for memory in map(root, (node, *node.all_input_nodes)):
            if memory.target is operator.getitem and is_gather(memory):
                last[memory] = node
    dying: dict[fx.Node, int] = defaultdict(int)
    for memory, node in last.items():
        dying[node] += memory.meta["val"].nbytes
    most = now = 0
    for node in graph.nodes:
        if node.target is _GATHER and is_gather(node):
            now += sum(value.nbytes for value in node.meta["val"])
        most = max(most, now)
        now -= dying[node]
    return most


@dataclass
class _Gradients:
    """The gradients of one layer that `ranks` ranks share: FQNs, bytes as computed, bytes as sent."""

    fqns: list[str] = field(default_factory=list)
    nbytes: int = 0
    sent: int = 0
    ranks: int = 1


def _gradients(source: PhaseGraph, sharded: ShardedLayers) -> list[_Gradients]:
    found: dict[tuple[str, RankGroup], _Gradients] = defaultdict(_Gradients)
    for role, node in results_of(source.graph):
        if isinstance(role, Gradient):
            group = sharded.group_of(role.fqn)
            value, layer = node.meta["val"], found[sharded.layer_of(node) or role.fqn, group]
            copies = 1 if value.dim() else group.ranks  # every rank needs the sum of a 0-dim gradient
            layer.ranks = group.ranks
            layer.fqns.append(role.fqn)
            layer.nbytes += value.nbytes
            layer.sent += copies * value.numel() * sharded.of_messages(value.dtype).itemsize
    return list(found.values())
