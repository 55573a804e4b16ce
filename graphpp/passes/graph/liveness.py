"""Compute the peak memory of a program from its graph: the most bytes alive at any time while it runs.

Contract: a value's lifetime ends after its last reader, where the rendered program deletes it; a view lies in the memory of its
source. The peak counts received values, saved values, and every value that the program computes, results included. A
gradient counts until it is handed to the runtime; a gradient whose factors are handed over instead counts nothing.
Parameters, buffers, inputs of the microbatch, and workspace inside an operator do not count.
"""

from __future__ import annotations

from torch import fx

from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.joint_graph import is_tensor, tensor_meta
from graphpp.runtime import program
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul


def peak_live_bytes(graph: fx.Graph) -> int:
    """The most bytes alive at any time while the program of a phase graph runs."""
    order = list(graph.nodes)
    dies = _deaths(graph, order)
    live = sum(_size(node) for node in order if node.op == "placeholder")
    peak = live
    ends: dict[int, int] = {}
    for node, at in dies.items():
        ends[at] = ends.get(at, 0) + _size(node)
    for at, node in enumerate(order):
        if node.op != "placeholder" and root(node) is node:
            live += _size(node)
            peak = max(peak, live)
        live -= ends.get(at, 0)
    return peak


def _deaths(graph: fx.Graph, order: list[fx.Node]) -> dict[fx.Node, int]:
    """Each allocating node -> the position of the last reader of its memory; results have none, except gradients."""
    end = graph.output_node()
    results = zip(end.meta.get("roles") or (), end.args[0], strict=False)  # type: ignore[arg-type]
    staying = {root(node) for role, node in results if not isinstance(role, program.Gradient)}
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        last.setdefault(root(node), at)
        if node is not end:
            for source in node.all_input_nodes:
                last[root(source)] = at
    return {memory: at for memory, at in last.items() if memory not in staying}


def _size(node: fx.Node) -> int:
    """The bytes that a node allocates, as far as the peak counts them."""
    if node.op == "placeholder" and not isinstance(node.meta["role"], program.Received | program.Saved):
        return 0
    if node.target is deferred_matmul:  # the runtime multiplies straight into the sum of gradients
        return 0
    return tensor_meta(node).nbytes if is_tensor(node) else 0
