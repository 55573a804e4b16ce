"""Let a head and its cross entropy work through the tokens in pieces, so that the logits of all tokens never exist.

Contract of `chunk_logits(module, tokens, ..)`
- A head and its cross entropy (`head_and_loss.py`) become `linear_cross_entropy` (`_torch/operators`), which reads the head's
  input, weight and bias where the loss stood. For any other cross entropy the function returns the reason why it stays. The
  order of all else stays.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from graphpp._torch.operators.linear_cross_entropy import LINEAR_CROSS_ENTROPY, Options
from graphpp.passes.forward.head_and_loss import LOSS, HeadAndLoss, Stays, head_of, like, rows_before_head

aten = torch.ops.aten


def chunk_logits(
    module: fx.GraphModule, tokens: int, autocast: torch.dtype | None
) -> tuple[int, list[Stays]]:
    """Rewrite an exported forward in place: (how many losses were rewritten, why the others were not).

    `tokens`: rows whose logits exist at one time. `autocast`: the dtype of autocast, under which the module will run.
    """
    rewritten, reasons = 0, list[Stays]()
    for node in [node for node in module.graph.nodes if node.target is LOSS]:
        try:
            _rewrite(module, head_of(node), tokens, autocast)
            rewritten += 1
        except Stays as reason:
            reasons.append(reason)
    if rewritten:
        module.graph.eliminate_dead_code()
    return rewritten, reasons


def _rewrite(module: fx.GraphModule, found: HeadAndLoss, tokens: int, autocast: torch.dtype | None) -> None:
    linear, loss = found.linear, found.loss
    if (autocast or linear.meta["val"].dtype) is torch.float16:
        raise Stays(linear, "the head computes in float16, in which a sum over tokens may overflow: use bfloat16")
    graph, (_, weight, bias) = module.graph, found.operands
    with graph.inserting_before(loss):
        rows, scale = rows_before_head(graph, found)
        operands = [rows, weight, bias]
        if autocast is not None:
            operands = [each and like(linear, graph.call_function(aten.to.dtype, (each, autocast))) for each in operands]
        dtype = torch.float32 if autocast is not None else loss.meta["val"].dtype
        needed = [torch.is_grad_enabled() and trains for trains in _trained(module, weight, bias)]
        options = Options(found.ignore_index, found.mean, found.smoothing, scale, dtype, tokens, needed)
        call = like(linear, graph.call_function(LINEAR_CROSS_ENTROPY, (*operands, found.target, *options)))
        value = like(loss, graph.call_function(operator.getitem, (call, 0)))
    loss.replace_all_uses_with(value)


def _trained(module: fx.GraphModule, weight: fx.Node, bias: fx.Node | None) -> list[bool]:
    """Whether the input, weight and bias of a linear layer may need a gradient."""
    found = [True]
    for operand in (weight, bias):
        tensor = operand and operand.op == "get_attr" and operator.attrgetter(operand.target)(module)  # type: ignore[arg-type]
        found.append(tensor.requires_grad if isinstance(tensor, torch.Tensor) else operand is not None)
    return found
