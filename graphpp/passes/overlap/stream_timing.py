"""Estimate the time and the peak memory of a graph in a given order of its operations, from a cost per operation.

Contract: one stream computes the operations in order; each process group has one link, which carries one collective at a time.
A collective starts once it is issued and its link is free. The stream stalls only at a wait whose collective is not done.
Values count until their last reader, received and saved ones from the start, and a collective's input until the wait.
Parameters, inputs of the microbatch and views do not count.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.collectives import group_of, is_started, is_wait
from graphpp.passes.graph.joint_graph import is_tensor
from graphpp.passes.graph.op_costs import Cost, nbytes
from graphpp.passes.graph.region import RegionCall
from graphpp.runtime import program
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul


class TimeEstimate(NamedTuple):
    """The cost of one order: `seconds` from start to end, and `peak`, the maximal live bytes."""

    seconds: float
    peak: int


class GraphTiming:
    """The costs, dependencies and memory of a graph's operations, independent of their order.

    `started`: the asynchronous collectives, with their groups. `tail`: seconds of the longest chain from a node's start to the
    end. `memory`: the node that allocated a value; `readers`: how many operations and results read a node's allocation.
    """

    def __init__(self, graph: fx.Graph, cost: Cost) -> None:
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.cost = {node: cost(node) for node in self.nodes}
        self.started = {node: group_of(node) for node in self.nodes if is_started(node)}
        self.collective_of = {node: _collective(node) for node in self.nodes if is_wait(node)}
        self.memory = {node: root(node) for node in graph.nodes if node.op != "output"}
        self._bytes = {memory: _allocated(memory) for memory in set(self.memory.values())}
        regions = {node: node.target.region.graph for node in self.nodes if isinstance(node.target, RegionCall)}
        self._inside = {node: _peak_inside(region) for node, region in regions.items()}
        self.reads = {node: self._reads(node) for node in self.nodes}
        self.readers = Counter(memory for reads in self.reads.values() for memory in reads)
        self.readers.update(self.memory[node] for node in _staying(graph))
        self.tail = self._tails()

    def bytes(self, memory: fx.Node) -> int:
        """The bytes that a node allocated; 0 for parameters and inputs, which the runtime holds for the whole step."""
        return self._bytes.get(memory, 0)

    def made(self, node: fx.Node) -> int:
        """The most bytes that an operation adds while it runs: its results, and for a region all that lives inside it."""
        if is_tensor(node):
            return self.bytes(node)
        if isinstance(node.target, RegionCall):
            return self._inside[node]
        return sum(self.bytes(user) for user in node.users if user.target is operator.getitem)

    def _reads(self, node: fx.Node) -> set[fx.Node]:
        """The allocating nodes of the values that a node reads; a wait also keeps the inputs of its collective alive."""
        reads = {self.memory[source] for source in node.all_input_nodes}
        if node in self.collective_of:
            reads |= {self.memory[source] for source in self.collective_of[node].all_input_nodes}
        return reads

    def _tails(self) -> dict[fx.Node, float]:
        """For each node the longest chain from its start to the end; collectives of a part form a chain."""
        tail: dict[fx.Node, float] = {}
        following: dict[object, float] = {}  # part -> tail of the next collective
        for node in reversed(self.nodes):
            after = max((tail[user] for user in node.users if user in tail), default=0.0)
            tail[node] = self.cost[node] + after
            if node in self.started:
                tail[node] = max(tail[node], following.get(node.meta.get("part"), 0.0))
                following[node.meta.get("part")] = tail[node]
        return tail


@dataclass
class SimulatedClock:
    """Runs operations on a simulated clock; `now` in seconds, `live` and `peak` in bytes."""

    timing: GraphTiming
    now: float = 0.0
    live: int = 0
    peak: int = 0
    done: dict[fx.Node, float] = field(default_factory=dict)  # collective -> the time of its end
    _links: dict[str, float] = field(default_factory=dict)
    _readers_left: Counter[fx.Node] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._readers_left = self.timing.readers.copy()
        self.live = sum(map(self.timing.bytes, self.timing.graph.find_nodes(op="placeholder")))
        self.peak = self.live

    def stall(self, wait: fx.Node) -> float:
        """Seconds until a wait would return if it ran now."""
        return max(0.0, self.done.get(self.timing.collective_of[wait], self.now) - self.now)

    def growth(self, node: fx.Node) -> tuple[int, int]:
        """Bytes that an operation adds while it runs, and the change of `live` afterwards (may be negative)."""
        timing = self.timing
        freed = sum(timing.bytes(memory) for memory in timing.reads[node] if self._readers_left[memory] == 1)
        return timing.made(node), timing.bytes(node) * bool(self._readers_left[node]) - freed

    def run(self, node: fx.Node) -> None:
        added, stays = self.growth(node)
        self.peak = max(self.peak, self.live + added)
        self.live += stays
        self._readers_left.subtract(self.timing.reads[node])
        if node in self.timing.started:
            group = self.timing.started[node]
            self.done[node] = max(self.now, self._links.get(group, 0.0)) + self.timing.cost[node]
            self._links[group] = self.done[node]
        elif node in self.timing.collective_of:
            self.now += self.stall(node)
        else:
            self.now += self.timing.cost[node]


class RestInOrder:
    """The memory of the operations that have not run, if they run in the given order from now on. `next`: the first unit."""

    def __init__(self, timing: GraphTiming, units: Sequence[fx.Node]) -> None:
        self._timing, self._units, self._ran = timing, iter(units), set[fx.Node]()
        self._at = {node: at for at, node in enumerate(timing.nodes)}
        self._left: dict[fx.Node, list[int]] = {memory: [] for memory in timing.memory.values()}  # places of readers to run
        for node in timing.nodes:
            for memory in timing.reads[node]:
                self._left[memory].append(self._at[node])
        for node in _staying(timing.graph):
            self._left[timing.memory[node]].append(len(timing.nodes))
        self.next = next(self._units)
        self._live = [0] * (len(timing.nodes) + 1)  # while the operation at a place runs
        for node, at in self._at.items():
            self._live[at] += 0 if is_tensor(node) else timing.made(node)
        for memory, left in self._left.items():
            begin = self._at.get(memory, 0)
            self._add(begin, max([begin, *left]), timing.bytes(memory))

    def peak_behind(self, unit: fx.Node, before: Sequence[fx.Node]) -> int:
        """The peak up to the place of a unit that runs now, after the views and waits `before` it; 0 if it is the next."""
        first, at, running = self._at[self.next], self._at[unit], [*before, unit]
        live = self._live[first:at]
        for memory in {memory for node in running for memory in self._timing.reads[node]}:
            read = {self._at[node] for node in running if memory in self._timing.reads[node]}
            left = self._left[memory]
            end = max((place for place in left if place not in read), default=-1)
            for place in range(max(end + 1, first), min(left[-1] + 1, at)):
                live[place - first] -= self._timing.bytes(memory)
        return max(live) + self._timing.made(unit) if live else 0

    def run(self, node: fx.Node) -> None:
        at, timing = self._at[node], self._timing
        for memory in timing.reads[node]:
            left = self._left[memory]
            last = left[-1]
            left.remove(at)
            self._add(left[-1] + 1 if left else 0, last, -timing.bytes(memory))
        self._add(0, at - 1, timing.bytes(node) * bool(self._left.get(node)))
        self._ran.add(node)
        while self.next in self._ran and (later := next(self._units, None)) is not None:
            self.next = later

    def _add(self, begin: int, end: int, nbytes: int) -> None:
        if nbytes:
            for place in range(max(begin, self._at[self.next]), end + 1):
                self._live[place] += nbytes


def estimate_order(timing: GraphTiming, order: Iterable[fx.Node]) -> TimeEstimate:
    clock = SimulatedClock(timing)
    for node in order:
        clock.run(node)
    return TimeEstimate(max([clock.now, *clock.done.values()]), clock.peak)


def _allocated(memory: fx.Node) -> int:
    held = memory.op == "placeholder" and not isinstance(memory.meta.get("role"), program.Received | program.Saved)
    added = memory.target is deferred_matmul  # directly into the gradient sum
    return 0 if held or added or not is_tensor(memory) else nbytes(memory)  # of a tuple the items count


def _peak_inside(region: fx.Graph) -> int:
    """The peak bytes of a region's operations, results included and inputs not."""
    timing = GraphTiming(region, lambda node: 0.0)
    return estimate_order(timing, timing.nodes).peak


def _collective(wait: fx.Node) -> fx.Node:
    """The collective of a wait: the wait's input, or the operation whose tuple has that input as an item."""
    source = wait.all_input_nodes[0]
    return source if is_started(source) or not source.all_input_nodes else source.all_input_nodes[0]


def _staying(graph: fx.Graph) -> Iterator[fx.Node]:
    """The values that are alive at the end of the program: all results except gradients, which the runtime gets when computed,
    and inputs that another program reads later (`meta["kept"]`)."""
    yield from (node for node in graph.find_nodes(op="placeholder") if node.meta.get("kept"))
    end = graph.output_node()
    results: tuple[fx.Node, ...] = end.args[0]  # type: ignore[assignment]
    roles = end.meta.get("roles") or (None,) * len(results)
    yield from (node for node, role in zip(results, roles, strict=True) if not isinstance(role, program.Gradient))
