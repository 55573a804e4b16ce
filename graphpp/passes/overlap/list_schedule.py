"""A list scheduler: the order of a graph's operations in which collectives run under the computing of others.

Contract
--------
`list_schedule(graph, cost)` returns every operation once, after all it reads, the collectives of each part of the graph
in their old order. Time is followed on a simulated clock (`stream_timing.py`):

    a collective is issued as soon as its input is there;
    a wait stands right before the first operation that reads what came, or where the clock says that it has come;
    of operations that need not wait, the one with the longest chain behind it runs first (collectives count in chains);
    when all must wait, the one that waits least.

Views and waits run when they are first read; items are taken out of tuples at once, so that tuples do not hold memory; a
view that is only a result is made at once, so that a gradient goes out when it is made.

Putting off what is not urgent fills waits, and holds memory. So several orders are made, each under a cap on live bytes
(multiples of what the given order needs), and of those that are nearly as fast as the fastest the one with the lowest
peak is taken; the given order too is one of them. The result depends on graph and costs alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from graphpp.passes.graph.aliases import shares_memory
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.op_costs import Cost
from graphpp.passes.overlap.stream_timing import GraphTiming, StreamClock, TimeEstimate, estimate_order

_CAPS = (1.0, 1.1, 1.25, 1.5, float("inf"))  # of the peak of the order as given
_NEARLY = 1.01  # an order that takes this much longer than the fastest is as good if it needs less memory

Priority = Callable[[fx.Node], float]


@dataclass(frozen=True)
class OperationOrder:
    """An order and what it costs, and what the order as given costs."""

    order: tuple[fx.Node, ...]
    estimate: TimeEstimate
    given: TimeEstimate


def list_schedule(graph: fx.Graph, cost: Cost) -> OperationOrder:
    """The best order found; the given one where there are no collectives to hide."""
    facts = GraphTiming(graph, cost)
    given = estimate_order(facts, facts.nodes)
    if not facts.started:
        return OperationOrder(tuple(facts.nodes), given, given)
    units = SchedulingUnits(facts)
    index = {node: place for place, node in enumerate(_evenly(facts.nodes))}
    priorities: tuple[Priority, ...] = (facts.tail.__getitem__, lambda node: -index[node])
    found = [(given, tuple(facts.nodes))]
    for priority in priorities:
        for cap in _CAPS:
            order = ListScheduler(units, priority, cap * given.peak).order()
            found.append((estimate_order(facts, order), order))
    fastest = min(each.seconds for each, _ in found)
    near = [pair for pair in found if pair[0].seconds <= _NEARLY * fastest]
    best, order = min(near, key=lambda pair: (pair[0].peak, pair[0].seconds))
    return OperationOrder(order, best, given)


def _evenly(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The operations of all parts in their own orders, the parts spread evenly over the whole."""
    parts: dict[object, list[fx.Node]] = {}
    for node in nodes:
        parts.setdefault(node.meta.get("part"), []).append(node)
    placed = [(place / len(each), node) for each in parts.values() for place, node in enumerate(each)]
    return [node for _, node in sorted(placed, key=lambda pair: pair[0])]


class SchedulingUnits:
    """What is scheduled: operations that are neither views, waits nor items; and what else must run before and after each."""

    def __init__(self, facts: GraphTiming) -> None:
        self.facts = facts
        self.lazy = {node for node in facts.nodes if _is_lazy(node)}
        self.units = [node for node in facts.nodes if node not in self.lazy and not _is_item(node)]
        self.final = self._final()
        ways = {unit: self._way(unit) for unit in self.units}
        self.before = {unit: before for unit, (before, _) in ways.items()}
        self.waits = {unit: waits for unit, (_, waits) in ways.items()}
        self._chain_collectives()
        self.after: dict[fx.Node, list[fx.Node]] = {unit: [] for unit in self.units}
        for unit, before in self.before.items():
            for other in before:
                self.after[other].append(unit)

    def _final(self) -> set[fx.Node]:
        """Lazy nodes that no unit reads, not even by way of others."""
        final: set[fx.Node] = set()
        for node in reversed(self.facts.nodes):
            if node in self.lazy and all(user.op == "output" or user in final for user in node.users):
                final.add(node)
        return final

    def _way(self, unit: fx.Node) -> tuple[set[fx.Node], list[fx.Node]]:
        """The units whose values a unit reads, and the waits on the way."""
        found: set[fx.Node] = set()
        passed: dict[fx.Node, None] = {}
        pending = list(unit.all_input_nodes)
        while pending:
            node = pending.pop()
            if node in passed or node.op == "placeholder":
                continue
            if node in self.lazy or _is_item(node):
                passed[node] = None
                pending += node.all_input_nodes
            else:
                found.add(node)
        return found, [node for node in passed if node in self.facts.collective_of]

    def _chain_collectives(self) -> None:
        """Each collective of a part after the one before it."""
        last: dict[object, fx.Node] = {}
        for unit in filter(is_collective, self.units):
            part = unit.meta.get("part")
            if part in last:
                self.before[unit].add(last[part])
            last[part] = unit

    def on_demand(self, unit: fx.Node, ran: set[fx.Node]) -> list[fx.Node]:
        """The views and waits that must run right before a unit, in order."""
        needed: dict[fx.Node, None] = {}

        def visit(node: fx.Node) -> None:
            for source in node.all_input_nodes:
                if source in self.lazy and source not in ran and source not in needed:
                    visit(source)
                    needed[source] = None

        visit(unit)
        return list(needed)


class ListScheduler:
    """One run over a graph's units: of those that fit under `cap` live bytes, the one of highest priority runs next."""

    def __init__(self, units: SchedulingUnits, priority: Priority, cap: float) -> None:
        self._units, self._priority, self._cap = units, priority, cap
        self._clock = StreamClock(units.facts)
        self._order: list[fx.Node] = []
        self._ran: set[fx.Node] = set()
        self._missing = {unit: len(before) for unit, before in units.before.items()}
        self._ready: dict[fx.Node, None] = {unit: None for unit, missing in self._missing.items() if not missing}
        self._arriving: list[fx.Node] = []  # waits that only the results read

    def order(self) -> tuple[fx.Node, ...]:
        """All operations."""
        for node in self._units.facts.nodes:
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
        for node in self._units.facts.nodes:
            if node not in self._ran:
                self._run(node)
        return tuple(self._order)

    def _choose(self) -> fx.Node:
        """The next unit: see the head of the file."""
        stalls = {unit: self._stall(unit) for unit in self._ready}
        running = [unit for unit, stall in stalls.items() if not stall]
        issued = [unit for unit in running if unit in self._units.facts.started]
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
        """Run what follows at once: items of a tuple, and views that are only results."""
        final = node in self._units.final
        if node in self._ran or not (final or _is_item(node)):
            return
        sources = [source for source in node.all_input_nodes if source.op != "placeholder"]
        if (only_inputs and sources) or not all(source in self._ran for source in sources):
            return
        if node in self._units.facts.collective_of:
            self._arriving.append(node)
        else:
            self._run(node)

    def _arrive(self) -> None:
        """Run the waits that only the results read, where what they wait for has come."""
        for wait in [wait for wait in self._arriving if not self._clock.stall(wait)]:
            self._arriving.remove(wait)
            self._run(wait)


def _is_item(node: fx.Node) -> bool:
    """An item of a tuple that an operation made (those of a tuple of views are views)."""
    return node.target is operator.getitem and not shares_memory(node)


def _is_lazy(node: fx.Node) -> bool:
    """A view, a wait, or an attribute: it costs nothing, or only waits."""
    return node.op == "get_attr" or shares_memory(node)
