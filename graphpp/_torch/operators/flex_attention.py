"""`torch.nn.attention.flex_attention` in a graph: two operators of torch, whose bodies are `score_mod` and `mask_mod`.

Contract: where no compiler fuses them, torch computes both operators from whole matrices of scores, on every device.

Checked on torch 2.11.0 and 2.13.0:

- `torch.nn.attention.flex_attention._validate_device`: refuses a backward on the CPU, which the operators have
- `torch._higher_order_ops.flex_attention`: `flex_attention_backward` and the names of its arguments; unfused, it computes the
  gradients of tensors captured by `score_mod` for those with `requires_grad`, which values of a program lack
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from graphpp._torch.this_thread import replaced

_LIBRARY = torch.library.Library("graphpp", "FRAGMENT")  # FRAGMENT: this module may be loaded twice in a process
_LIBRARY.define("requiring_grad(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("requiring_grad", lambda x: x.detach().requires_grad_(), "CompositeImplicitAutograd")
_REQUIRING_GRAD = torch.ops.graphpp.requiring_grad.default
_FIRST_CAPTURED = 5  # a `score_mod` takes score, batch, head, two positions, and the tensors that it captures


@contextlib.contextmanager
def trains_on_cpu() -> Iterator[None]:
    """While open, a model may call `flex_attention` with gradients on the CPU."""
    from torch.nn.attention import flex_attention  # not with `import graphpp`: it imports Dynamo

    original: Any = vars(flex_attention)["_validate_device"]

    def check(query: Any, key: Any, value: Any) -> None:
        if query.device.type != "cpu":
            original(query, key, value)

    with replaced(flex_attention, "_validate_device", check):
        yield


def keep_captured_gradients(graph: fx.Graph) -> None:
    """Give the backward operator tensors with `requires_grad` where its body computes a captured tensor's gradient, in place."""
    backward = getattr(torch.ops.higher_order, "flex_attention_backward", None)
    for node in graph.find_nodes(op="call_function", target=backward):
        names = list(inspect.signature(type(backward).__call__).parameters)[1:]
        args = dict(zip(names, node.args, strict=False))
        body: Any = args["joint_graph"]
        gradients = body.meta["held"].graph.output_node().args[0][_FIRST_CAPTURED:]
        captured = list(args.get("score_mod_other_buffers", ()))
        for at, (value, gradient) in enumerate(zip(captured, gradients, strict=True)):
            if gradient is not None:
                with graph.inserting_before(node):
                    captured[at] = graph.call_function(_REQUIRING_GRAD, (value,))
                captured[at].meta = {**node.meta, "val": value.meta["val"]}
        node.args = tuple((args | {"score_mod_other_buffers": tuple(captured)}).values())
