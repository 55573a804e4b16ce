"""Find the operations that prevent recording a graph as a CUDA graph; further obstacles appear only at the recording."""

from __future__ import annotations

import torch
from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp.passes.graph.aliases import is_view
from graphpp.passes.graph.collectives import is_collective, is_wait
from graphpp.passes.graph.joint_graph import is_check
from graphpp.passes.graph.region import RegionCall

_READ_BY_HOST = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
COMPUTES_NOTHING = "it computes nothing"
_MASKS = (torch.bool, torch.uint8)
_CONTROL = ("cond", "while_loop")


def cuda_graph_obstacle(graph: fx.Graph, device: str = "cuda") -> str | None:
    """The first reason not to record a graph, or None; all its tensors should be on devices of type `device`.

    A graph without computation, and an operation, also of a compiled region, that exchanges values with other ranks, makes the
    host wait or is not on the GPU, cannot be recorded.
    """
    if all(node.op in ("placeholder", "output") or is_view(node) for node in graph.nodes):
        return COMPUTES_NOTHING
    return next((found for node in graph.nodes if (found := _of(node, device)) is not None), None)


def _is_read_by_host(node: fx.Node) -> bool:
    if node.target is torch.ops.aten.index.Tensor:  # index tensors are positions, or masks, whose true elements the host counts
        return any(index is not None and index.meta["val"].dtype in _MASKS for index in node.args[1])  # type: ignore[union-attr]
    return any(tag in getattr(node.target, "tags", ()) for tag in _READ_BY_HOST)


def _of(node: fx.Node, device: str) -> str | None:
    if isinstance(node.target, RegionCall):
        return cuda_graph_obstacle(node.target.region.graph, device)
    if is_collective(node) or is_wait(node):
        return f"{node} exchanges values with other ranks"
    if is_check(node) or _is_read_by_host(node):
        return f"the host waits for {node}"
    if getattr(node.target, "__name__", "") in _CONTROL and node.op == "call_function":
        return f"the host decides which branch of {node} runs"
    value = node.meta.get("val")
    if has_unknown_size(value):
        return f"the data decides the size of {node}"
    elsewhere = isinstance(value, torch.Tensor) and value.device.type != device
    return f"{node} is on the {value.device.type}" if elsewhere else None  # type: ignore[union-attr]
