"""Relax views: no operation depends on strides that the trace predicted. Bit-preserving.

Contract: a kernel may return other strides than its fake kernel predicted (BatchNorm of a transposed input does, on CPU).
Then `view` raises at run time, and `as_strided` reads the wrong elements. Afterwards every `view` is a `reshape`, which
returns the same view where one exists. An operation that reads memory by its layout (`as_strided`, a view to another dtype, a
collective) gets a contiguous input wherever the traced input was contiguous.
"""

from __future__ import annotations

import torch
from torch import fx

from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.joint_graph import JointGraph, is_tensor

aten = torch.ops.aten

_VIEWS = {aten.view.default, aten._unsafe_view.default}
_BY_LAYOUT = {aten.view_as_complex.default, aten.view.dtype, aten.as_strided.default}


def relax_views(joint: JointGraph) -> JointGraph:
    """Make views independent of the strides at run time, in place."""
    for node in list(joint.computed()):
        if node.target in _VIEWS:
            node.target = aten.reshape.default
        elif node.target in _BY_LAYOUT or is_collective(node):
            for source in node.all_input_nodes:
                _make_contiguous(joint.graph, node, source)
    return joint


def _make_contiguous(graph: fx.Graph, node: fx.Node, source: fx.Node) -> None:
    value = source.meta["val"]
    if source.op == "placeholder" or not is_tensor(source) or not value.is_contiguous() or value.storage_offset():
        return
    with graph.inserting_before(node):
        layout = graph.call_function(aten.contiguous.default, (source,))
    layout.meta = {**node.meta, "val": value}
    node.replace_input_with(source, layout)
