"""Compute the peak memory of a program from its graph: the most bytes alive at any time while it runs.

Contract: a value lives until its last reader, where the rendered program deletes it; a view lies in the memory of its source.
The peak counts received, saved and computed values, including results. A saved value that a later program of the microbatch
also reads (`meta["kept"]`) stays alive. A gradient counts until it is handed to the runtime; if its factors are handed over,
the workspace of the multiplication counts (`meta["workspace"]`), and so does that of `linear_cross_entropy`. Parameters,
buffers, inputs of the microbatch, the workspace of other operators, and gathered parameters (`meta["gathers"]`, see
`Program.layers`) do not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import known
from graphpp._torch.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY, workspace
from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.joint_graph import is_tensor, results_of
from graphpp.runtime import program
from graphpp.runtime.gradients.gemm_accumulation import deferred_matmul


def live_bytes(graph: fx.Graph) -> tuple[int, ...]:
    """The changes of live memory in bytes, in order, while the program of a phase graph runs."""
    return tuple(sign * _size(node) for sign, node in live_values(graph))


def live_values(graph: fx.Graph) -> Iterator[tuple[int, fx.Node]]:
    """(1, node) where a node's value is allocated, (-1, node) where its memory is freed, in order."""
    order = list(graph.nodes)
    ends: dict[int, list[fx.Node]] = defaultdict(list)
    for node, at in _deaths(graph, order).items():
        ends[at].append(node)
    yield from ((1, node) for node in order if node.op == "placeholder")
    for at, node in enumerate(order):
        if node.op != "placeholder" and root(node) is node:
            yield 1, node
        yield from ((-1, dead) for dead in ends[at])


def sent_alone(graph: fx.Graph) -> tuple[int, ...]:
    """The bytes of each memory of values sent to the neighbouring stage, except memory with a saved value."""
    results = results_of(graph)
    saved = {root(node) for role, node in results if isinstance(role, program.Saved)}
    sent = dict.fromkeys(root(node) for role, node in results if isinstance(role, program.Sent))
    return tuple(_size(memory) for memory in sent if memory not in saved)


def counts_in_peak(node: fx.Node) -> bool:
    return _size(node) > 0


def _deaths(graph: fx.Graph, order: list[fx.Node]) -> dict[fx.Node, int]:
    """Each allocating node -> the position of the last reader of its memory; values that stay alive are left out."""
    end = graph.output_node()
    results = zip(end.meta.get("roles") or (), end.args[0], strict=False)  # type: ignore[arg-type]
    staying = {root(node) for role, node in results if not isinstance(role, program.Gradient)}
    staying.update(node for node in order if node.meta.get("kept"))
    last: dict[fx.Node, int] = {}
    for at, node in enumerate(order):
        last.setdefault(root(node), at)
        if node is not end:
            for source in node.all_input_nodes:
                last[root(source)] = at
    return {memory: at for memory, at in last.items() if memory not in staying}


def _size(node: fx.Node) -> int:
    if node.op == "placeholder" and not isinstance(node.meta["role"], program.Received | program.Saved):
        return 0
    if node.target is deferred_matmul:  # the runtime adds the product directly into the gradient sum
        return int(node.meta.get("workspace", 0))
    if node.target is LINEAR_CROSS_ENTROPY:
        operands: Any = fx.node.map_arg(node.args, lambda source: source.meta["val"])
        return int(known(workspace(*operands)))
    if not is_tensor(node) or "gathers" in node.meta:
        return 0
    value: torch.Tensor = node.meta["val"]
    elements: int = known(value.numel())
    return elements * value.dtype.itemsize
