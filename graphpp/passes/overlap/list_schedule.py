"""Order the operations of a graph by list scheduling, so that collectives run while other operations compute.

Contract: `list_schedule(graph, cost)` returns every operation once, after all its inputs; the collectives of each part of the
graph keep their order. The scheduler follows a simulated clock (`stream_timing.py`):

    a collective is issued as soon as its input is computed;
    a wait runs right before the first operation that reads its result; if only results of the graph read it, once the
        collective is done on the clock;
    among operations that need not wait, the one with the highest priority runs next: the longest chain of operations after it
        (including collectives), or, in a second set of orders, the earliest of all parts' operations interleaved evenly;
    if all operations must wait, the one with the shortest wait runs next.

Views run right before their first reader; a view that only the results read runs at once, so that the runtime gets a gradient
when it is computed. Items of a tuple are extracted at once, so that the tuple keeps no memory alive.

Deferring an operation fills waits but holds memory. So several orders are made, each under a cap on live bytes. Among the
orders that are nearly as fast as the fastest, including the original one, the one with the lowest peak is returned; with
`keep_peak` none that exceeds the original peak. The result depends only on the graph and the costs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from heapq import nsmallest

from torch import fx

from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.joint_graph import reached
from graphpp.passes.graph.op_costs import Cost
from graphpp.passes.overlap.stream_timing import GraphTiming, RestInOrder, SimulatedClock, TimeEstimate, estimate_order

_CAPS = (1.0, 1.1, 1.25, 1.5, float("inf"))  # multiples of the original order's peak
_TRIES = 8  # of ready units, where an order must keep its peak: each takes time with the graph's length
_NEARLY = 1.01  # orders up to this factor slower than the fastest compete by their peaks

Priority = Callable[[fx.Node], float]
Scheduled = tuple[Sequence[fx.Node], TimeEstimate, TimeEstimate]


def list_schedule(graph: fx.Graph, cost: Cost, *, keep_peak: bool = False) -> Scheduled:
    """The best order, its estimate, and the estimate of the original order, which is the best without collectives."""
    timing = GraphTiming(graph, cost)
    original = estimate_order(timing, timing.nodes)
    computed = sum(seconds for node, seconds in timing.cost.items() if node not in timing.started)
    if not timing.started or (keep_peak and original.seconds <= _NEARLY * computed):  # too little to hide
        return timing.nodes, original, original
    units = SchedulingUnits(timing)
    index = {node: at for at, node in enumerate(_evenly(timing.nodes))}
    priorities: tuple[Priority, ...] = (timing.tail.__getitem__, lambda node: -index[node])
    found, scheduler = [(original, tuple(timing.nodes))], PeakKeepingScheduler if keep_peak else ListScheduler
    for priority in priorities:
        for cap in (1.0,) if keep_peak else _CAPS:
            order = scheduler(units, priority, cap * original.peak).order()
            found.append((estimate_order(timing, order), order))
    found = [pair for pair in found if not keep_peak or pair[0].peak <= original.peak]
    fastest = min(each.seconds for each, _ in found)
    near = [pair for pair in found if pair[0].seconds <= _NEARLY * fastest]
    best, order = min(near, key=lambda pair: (pair[0].peak, pair[0].seconds))
    return order, best, original


def _evenly(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The operations of all parts, interleaved evenly, with the order of each part kept."""
    parts: dict[object, list[fx.Node]] = {}
    for node in nodes:
        parts.setdefault(node.meta.get("part"), []).append(node)
    placed = [(place / len(each), node) for each in parts.values() for place, node in enumerate(each)]
    return [node for _, node in sorted(placed, key=lambda pair: pair[0])]


class SchedulingUnits:
    """The units to schedule (operations except views, waits and items of tuples), and their dependencies."""

    def __init__(self, timing: GraphTiming) -> None:
        self.timing = timing
        self.lazy = {node for node in timing.nodes if node.op == "get_attr" or shares_memory(node)}
        self.units = [node for node in timing.nodes if node not in self.lazy and not _is_item(node)]
        self.final = self._final()
        reads = {unit: self._reads(unit) for unit in self.units}
        self.before = {unit: before for unit, (before, _) in reads.items()}
        self.waits = {unit: waits for unit, (_, waits) in reads.items()}
        self._chain_collectives()
        self.after: dict[fx.Node, list[fx.Node]] = {unit: [] for unit in self.units}
        for unit, before in self.before.items():
            for other in before:
                self.after[other].append(unit)

    def _final(self) -> set[fx.Node]:
        final: set[fx.Node] = set()
        for node in reversed(self.timing.nodes):
            if node in self.lazy and all(user.op == "output" or user in final for user in node.users):
                final.add(node)
        return final

    def _reads(self, unit: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
        """The units whose values a unit reads, also through views, items and waits; and the waits on these paths."""
        passed = reached(unit.all_input_nodes, lambda node: node.all_input_nodes if self._is_passed(node) else ())
        units = {node for node in passed if node.op != "placeholder" and not self._is_passed(node)}
        return units, [node for node in passed if node in self.timing.collective_of]

    def _is_passed(self, node: fx.Node) -> bool:
        return node in self.lazy or _is_item(node)

    def _chain_collectives(self) -> None:
        last: dict[object, fx.Node] = {}
        for unit in filter(is_collective, self.units):
            part = unit.meta.get("part")
            if part in last:
                self.before[unit].add(last[part])
            last[part] = unit

    def on_demand(self, unit: fx.Node, ran: set[fx.Node]) -> list[fx.Node]:
        """The views and waits that a unit reads and that have not run yet, in order."""
        needed: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in self.lazy and source not in ran and source not in needed:
                    visit(source)
                    needed[source] = None

        visit(unit)
        return list(needed)


class ListScheduler:
    """One run over a graph's units: of the ready units that fit under `cap` live bytes, the one of highest priority runs."""

    def __init__(self, units: SchedulingUnits, priority: Priority, cap: float) -> None:
        self._units, self._priority, self._cap = units, priority, cap
        self._clock = SimulatedClock(units.timing)
        self._order: list[fx.Node] = []
        self._ran: set[fx.Node] = set()
        self._missing = {unit: len(before) for unit, before in units.before.items()}
        self._ready: dict[fx.Node, None] = {unit: None for unit, missing in self._missing.items() if not missing}
        self._arriving: list[fx.Node] = []  # pending waits that only the results read

    def order(self) -> tuple[fx.Node, ...]:
        """All operations of the graph in the chosen order; call it once."""
        for node in self._units.timing.nodes:
            self._follow(node, only_inputs=True)
        while self._ready:
            unit = self._choose()
            del self._ready[unit]
            for node in [*self._units.on_demand(unit, self._ran), unit]:
                self._run(node)
            for after in self._units.after[unit]:
                self._missing[after] -= 1
                if not self._missing[after]:
                    self._ready[after] = None
            self._arrive()
        for node in self._units.timing.nodes:
            if node not in self._ran:
                self._run(node)
        return tuple(self._order)

    def _choose(self) -> fx.Node:
        """The next unit, by the rules at the head of the file; if none fits under the cap, the unit that adds fewest bytes."""
        stalls = {unit: self._stall(unit) for unit in self._ready}
        running = [unit for unit, stall in stalls.items() if not stall]
        issued = [unit for unit in running if unit in self._units.timing.started]
        fitting = issued or [unit for unit in running if self._fits(unit)]
        if fitting:
            return max(fitting, key=self._priority)
        waiting = [unit for unit, stall in stalls.items() if stall and self._fits(unit)]
        if waiting:
            return min(waiting, key=lambda unit: (stalls[unit], -self._priority(unit)))
        return min(self._ready, key=lambda unit: (self._clock.growth(unit)[1], stalls[unit], -self._priority(unit)))

    def _fits(self, unit: fx.Node) -> bool:
        added, stays = self._clock.growth(unit)
        return self._clock.live + added <= self._cap or stays <= 0

    def _stall(self, unit: fx.Node) -> float:
        waits = (node for node in self._units.waits[unit] if node not in self._ran)
        return max(map(self._clock.stall, waits), default=0.0)

    def _run(self, node: fx.Node) -> None:
        if node in self._ran:
            return
        self._clock.run(node)
        self._order.append(node)
        self._ran.add(node)
        for user in node.users:
            self._follow(user)

    def _follow(self, node: fx.Node, only_inputs: bool = False) -> None:
        """Run a node at once if it is an item of a tuple, or a view that only the results read."""
        final = node in self._units.final
        if node in self._ran or not (final or _is_item(node)):
            return
        sources = [source for source in node.all_input_nodes if source.op != "placeholder"]
        if (only_inputs and sources) or not all(source in self._ran for source in sources):
            return
        if node in self._units.timing.collective_of:
            self._arriving.append(node)
        else:
            self._run(node)

    def _arrive(self) -> None:
        """Run the waits that only the results read once their collectives are done on the clock."""
        for wait in [wait for wait in self._arriving if not self._clock.stall(wait)]:
            self._arriving.remove(wait)
            self._run(wait)


class PeakKeepingScheduler(ListScheduler):
    """A run that can finish in the given order at any time: what runs ahead leaves room for all that has not run.

    A unit that must not wait runs before others, and a collective before the rest of these. If none of the first `_TRIES` fits,
    the next unit of the given order does.
    """

    def __init__(self, units: SchedulingUnits, priority: Priority, cap: float) -> None:
        super().__init__(units, priority, cap)
        self._rest = RestInOrder(units.timing, units.units)

    def _choose(self) -> fx.Node:
        started, stalls = self._units.timing.started, {unit: self._stall(unit) for unit in self._ready}
        wanted = nsmallest(_TRIES, self._ready, key=lambda unit: (stalls[unit], unit not in started, -self._priority(unit)))
        return next(filter(self._fits, wanted), self._rest.next)

    def _fits(self, unit: fx.Node) -> bool:
        now = self._clock.live + self._clock.growth(unit)[0]
        return max(now, self._rest.peak_behind(unit, self._units.on_demand(unit, self._ran))) <= self._cap

    def _run(self, node: fx.Node) -> None:
        if node not in self._ran:
            self._rest.run(node)
        super()._run(node)


def _is_item(node: fx.Node) -> bool:
    """Whether a node is an item of a tuple of allocated tensors; an item of a tuple of views is a view."""
    return node.target is operator.getitem and not shares_memory(node)
