"""The order stays topological while edges are added and removed, and exactly the edges that close a cycle are refused."""

from __future__ import annotations

from random import Random

import networkx
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpp.schedules.rewrite.p2p_batches import DynamicTopologicalOrder
from tests.exhaustive import examples


@given(st.randoms(use_true_random=False), st.integers(2, 12), st.integers(1, 60))
@settings(deadline=None, max_examples=examples(150))
def test_any_edges(random: Random, nodes: int, changes: int) -> None:
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(nodes))
    shuffled = random.sample(range(nodes), nodes)
    for _ in range(nodes):
        one, other = sorted(random.sample(range(nodes), 2))
        graph.add_edge(shuffled[one], shuffled[other])
    order = DynamicTopologicalOrder([*graph.edges, *((-1, node) for node in range(nodes))])
    for _ in range(changes):
        one, other = random.sample(range(nodes), 2)
        assert order.has(one, other) == graph.has_edge(one, other)
        if graph.has_edge(one, other):
            order.remove(one, other)
            graph.remove_edge(one, other)
        else:
            closes = networkx.has_path(graph, other, one)
            assert order.add(one, other) != closes
            assert order.has(one, other) != closes
            graph.add_edges_from([] if closes else [(one, other)])


def test_an_edge_to_itself() -> None:
    order = DynamicTopologicalOrder([(0, 1)])
    assert not order.add(1, 1)
    assert order.add(0, 1)
