"""How long a graph takes in a given order of its operations, and how much memory, by a cost for each operation.

Contract: one stream computes, in the order given; each process group has a link that carries one collective at a time.
A collective starts when it is issued and its link is free, and takes its cost; computing stands still only at a wait whose
collective is not done. Bytes are those of the values that live on: what a phase received and saved counts from the
start until its last reader, parameters and inputs do not count, views cost nothing, and what a collective sends lives
until its wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.collectives import group_of, is_started, is_wait
from graphpp.passes.graph.op_costs import Cost, nbytes
from graphpp.runtime import program
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul


@dataclass(frozen=True)
class TimeEstimate:
    """Seconds from start to end, of operations alone, and of collectives alone; the least possible; bytes at the peak."""

    seconds: float
    compute: float
    collectives: float
    bound: float
    peak: int

    @property
    def hidden(self) -> float:
        """The share of the collectives' time under which something computed, 0 to 1."""
        return self._share(self.seconds)

    @property
    def possible(self) -> float:
        """The share that no order can exceed, 0 to 1."""
        return self._share(self.bound)

    def _share(self, seconds: float) -> float:
        return 1 - (seconds - self.compute) / self.collectives if self.collectives else 1.0


class GraphTiming:
    """What a graph's operations take and hold, whatever their order."""

    def __init__(self, graph: fx.Graph, cost: Cost) -> None:
        self.graph = graph
        self.nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
        self.cost = {node: cost(node) for node in self.nodes}
        self.started = {node: group_of(node) for node in self.nodes if is_started(node)}
        self.collective_of = {node: _collective(node) for node in self.nodes if is_wait(node)}
        self.memory = {node: root(node) for node in graph.nodes if node.op != "output"}
        self.reads = {node: self._reads(node) for node in self.nodes}
        self.readers = Counter(memory for reads in self.reads.values() for memory in reads)
        self.readers.update(self.memory[node] for node in _kept(graph))
        self.tail = self._tails()

    def bytes(self, memory: fx.Node) -> int:
        """The bytes of what a node allocated; 0 for what somebody else holds anyway."""
        role = memory.meta.get("role")
        if memory.target is deferred_matmul:  # written into the sum of gradients
            return 0
        return nbytes(memory) if role is None or isinstance(role, program.Received | program.Saved) else 0

    def bound(self) -> float:
        """The least time any order can take: computing, the longest chain, or the collectives of one group in a row."""
        compute = sum(seconds for node, seconds in self.cost.items() if node not in self.started)
        return max([compute, *self.tail.values(), *map(self._link_bound, set(self.started.values()))])

    def _link_bound(self, group: str) -> float:
        """The collectives of a group in a row, what must come before the first and after the last."""
        head = self._heads()
        of_group = [node for node, name in self.started.items() if name == group]
        before = min(head[node] - self.cost[node] for node in of_group)
        after = min(self.tail[node] - self.cost[node] for node in of_group)
        return before + sum(self.cost[node] for node in of_group) + after

    def _reads(self, node: fx.Node) -> set[fx.Node]:
        """The memories that a node reads, or that must not go before it."""
        reads = {self.memory[source] for source in node.all_input_nodes}
        if node in self.collective_of:
            reads |= {self.memory[source] for source in self.collective_of[node].all_input_nodes}
        return reads

    def _tails(self) -> dict[fx.Node, float]:
        """For each node the longest chain from its start to the end; a collective is issued before its side's next."""
        tail: dict[fx.Node, float] = {}
        following: dict[object, float] = {}  # part -> tail of the collective after this one
        for node in reversed(self.nodes):
            after = max((tail[user] for user in node.users if user in tail), default=0.0)
            tail[node] = self.cost[node] + after
            if node in self.started:
                tail[node] = max(tail[node], following.get(node.meta.get("part"), 0.0))
                following[node.meta.get("part")] = tail[node]
        return tail

    def _heads(self) -> dict[fx.Node, float]:
        head: dict[fx.Node, float] = {}
        for node in self.nodes:
            before = max((head[source] for source in node.all_input_nodes if source in head), default=0.0)
            head[node] = self.cost[node] + before
        return head


@dataclass
class StreamClock:
    """The state while operations run one after another: time, links, and what lives."""

    facts: GraphTiming
    now: float = 0.0
    live: int = 0
    peak: int = 0
    done: dict[fx.Node, float] = field(default_factory=dict)  # collective -> when it is done
    _links: dict[str, float] = field(default_factory=dict)
    _left: Counter[fx.Node] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._left = self.facts.readers.copy()
        self.live = sum(map(self.facts.bytes, self.facts.graph.find_nodes(op="placeholder")))
        self.peak = self.live

    def stall(self, wait: fx.Node) -> float:
        """Seconds until a wait would return."""
        return max(0.0, self.done.get(self.facts.collective_of[wait], self.now) - self.now)

    def growth(self, node: fx.Node) -> tuple[int, int]:
        """Bytes that an operation adds while it runs, and bytes that stay added afterwards."""
        facts = self.facts
        added = facts.bytes(node) if facts.memory[node] is node else 0
        freed = sum(facts.bytes(memory) for memory in facts.reads[node] if self._left[memory] == 1)
        return added, added * bool(self._left[node]) - freed

    def run(self, node: fx.Node) -> None:
        """Run the next operation."""
        added, stays = self.growth(node)
        self.peak = max(self.peak, self.live + added)
        self.live += stays
        self._left.subtract(self.facts.reads[node])
        if node in self.facts.started:
            group = self.facts.started[node]
            self.done[node] = max(self.now, self._links.get(group, 0.0)) + self.facts.cost[node]
            self._links[group] = self.done[node]
        elif node in self.facts.collective_of:
            self.now += self.stall(node)
        else:
            self.now += self.facts.cost[node]

    def estimate(self) -> TimeEstimate:
        """What the order that ran has cost."""
        facts = self.facts
        collectives = sum(facts.cost[node] for node in facts.started)
        compute = sum(facts.cost.values()) - collectives
        return TimeEstimate(max([self.now, *self.done.values()]), compute, collectives, facts.bound(), self.peak)


def estimate_order(facts: GraphTiming, order: Iterable[fx.Node]) -> TimeEstimate:
    """The cost of one order."""
    clock = StreamClock(facts)
    for node in order:
        clock.run(node)
    return clock.estimate()


def _collective(wait: fx.Node) -> fx.Node:
    """The collective that a node waits for; some return tuples, of which items are waited for."""
    source = wait.all_input_nodes[0]
    return source if is_started(source) or not source.all_input_nodes else source.all_input_nodes[0]


def _kept(graph: fx.Graph) -> Iterator[fx.Node]:
    """The results that stay when the program has run; gradients are handed out as they are made."""
    end = graph.output_node()
    results: tuple[fx.Node, ...] = end.args[0]  # type: ignore[assignment]
    roles = end.meta.get("roles") or (None,) * len(results)
    yield from (node for node, role in zip(results, roles, strict=True) if not isinstance(role, program.Gradient))
