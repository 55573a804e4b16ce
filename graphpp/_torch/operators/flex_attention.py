"""`torch.nn.attention.flex_attention` in a graph: two operators of torch, whose bodies are `score_mod` and `mask_mod`.

Contract: where no compiler fuses them, torch computes both operators from whole matrices of scores, on every device.

Checked on torch 2.13.0:

- `torch.nn.attention.flex_attention._validate_device`: refuses a backward on the CPU, which the operators have
- `torch.nn.attention.flex_attention._sliced_mask_mod_error`, by name: the `mask_mod` of torch's slices of a mask, which raises
- `torch._higher_order_ops.flex_attention`: `flex_attention_backward` and the names of its arguments; unfused, it computes the
  gradients of tensors captured by `score_mod` for those with `requires_grad`, which values of a program lack
"""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpp._torch.this_thread import replaced
from graphpp.errors import CaptureError

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
_LIBRARY.define("requiring_grad(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("requiring_grad", lambda x: x.detach().requires_grad_(), "CompositeImplicitAutograd")
FORWARD, BACKWARD = torch.ops.higher_order.flex_attention, torch.ops.higher_order.flex_attention_backward
_REQUIRING_GRAD = torch.ops.graphpp.requiring_grad.default
SLICED = "_sliced_mask_mod_error"
_FIRST_CAPTURED = 5  # a `score_mod` gets score, batch, head, two positions, and the tensors that it captures


def is_block_mask(value: Any) -> bool:
    module = sys.modules.get("torch.nn.attention.flex_attention")  # not imported: no mask exists
    return module is not None and isinstance(value, module.BlockMask)


def forward_flops(query: torch.Tensor, key: torch.Tensor, *rest: Any) -> Any:
    """FLOPs of both products over all pairs of positions; the backward computes 2.5 times as many."""
    batch, heads, tokens, width = query.shape
    return 4 * batch * heads * tokens * key.shape[2] * width


def is_fused(node: fx.Node) -> bool:
    """Whether a node is one of the operators where a compiler can fuse it: on every device but the CPU."""
    operand: Any = node.args[0] if node.target in (FORWARD, BACKWARD) else None
    return operand is not None and operand.meta["val"].device.type != "cpu"


@contextlib.contextmanager
def trains_on_cpu() -> Iterator[None]:
    """While open, a model may call `flex_attention` with gradients on the CPU, also where warnings are errors."""
    from torch.nn.attention import flex_attention  # not with `import graphpp`: it imports Dynamo

    original: Any = getattr(flex_attention, "_validate_device", None)

    def check(query: Any, key: Any, value: Any) -> None:
        if query.device.type != "cpu":
            original(query, key, value)

    patch = contextlib.nullcontext() if original is None else replaced(flex_attention, "_validate_device", check)
    with patch, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")  # Dynamo asks for it
        yield


def inline_numbers(module: fx.GraphModule) -> list[fx.Node]:
    """Replace constants without dimensions in the operators' bodies, as of `table[head, 1]`, by operations, in place.

    The next trace differentiates a body outside of its functional mode, which a constant would bring back. Returns the
    operators with other constants in their bodies.
    """
    others = []
    for node in module.graph.find_nodes(op="call_function", target=FORWARD):
        held = [operator.attrgetter(str(each.target))(module) for each in node.all_input_nodes if each.op == "get_attr"]
        for body in (each for each in held if isinstance(each, fx.GraphModule)):
            for constant in body.graph.find_nodes(op="get_attr"):
                _inline(body, constant)
            body.recompile()
            others += [node] * any(isinstance(value, torch.Tensor) for _, value in body.named_buffers())
    return others


def _inline(body: fx.GraphModule, constant: fx.Node) -> None:
    graph, value = body.graph, getattr(body, str(constant.target))
    copies = [user for user in constant.users if user.target is torch.ops.aten.lift_fresh_copy.default]
    for copy in copies if isinstance(value, torch.Tensor) and not value.dim() else ():
        with graph.inserting_before(copy):
            options = {"dtype": value.dtype, "device": value.device}
            made = graph.call_function(torch.ops.aten.full.default, ([], value.item()), options)
        made.meta = dict(copy.meta)
        copy.replace_all_uses_with(made)
        graph.erase_node(copy)
    if copies and not constant.users:  # else the next trace makes the constant an input
        graph.erase_node(constant)
        delattr(body, str(constant.target))


def keep_captured_gradients(graph: fx.Graph) -> None:
    """Give the backward operator tensors with `requires_grad` where its body computes a captured tensor's gradient, in place.

    Raises `CaptureError` for a trained tensor that `score_mod` reads without an index.
    """
    names = list(inspect.signature(type(BACKWARD).__call__).parameters)[1:]
    for node in graph.find_nodes(op="call_function", target=BACKWARD):
        args = dict(zip(names, node.args, strict=False))
        body: Any = args["joint_graph"]
        results = body.meta["held"].graph.output_node().args[0]
        captured: list[Any] = list(args.get("score_mod_other_buffers", ()))
        for at, (value, gradient) in enumerate(zip(captured, results[_FIRST_CAPTURED:], strict=True)):
            if gradient is not None:
                _refuse_unindexed(node, value, gradient)
                with graph.inserting_before(node):
                    captured[at] = graph.call_function(_REQUIRING_GRAD, (value,))
                captured[at].meta = {**node.meta, "val": value.meta["val"]}
        node.args = tuple((args | {"score_mod_other_buffers": tuple(captured)}).values())


def _refuse_unindexed(node: fx.Node, value: fx.Node, gradient: fx.Node) -> None:
    """Raise `CaptureError` if a captured tensor's gradient differs from score to score, and no index adds the scores up."""
    of_scores = gradient.graph.find_nodes(op="placeholder")[: _FIRST_CAPTURED + 1]  # the last one is the score's gradient
    pending = [gradient]
    while pending:
        source = pending.pop()
        if source in of_scores:
            name, call = getattr(value.meta.get("role"), "fqn", value.name), (node.meta["calls"] or ("",))[-1]
            raise CaptureError(
                f"score_mod of flex_attention in module {call!r} at {node.meta['source'] or 'the loss'} reads the trained "
                f"tensor {name} without an index, and torch has no gradient for that. Give it a dimension, and index it, "
                "for example scale = self.scale.view(1) before score_mod, and scale[head * 0] in it."
            )
        pending += [] if source.target is torch.ops.flex_lib.zeros_and_scatter.default else source.all_input_nodes
