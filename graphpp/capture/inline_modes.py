"""Inline regions of `torch.autocast` and `torch.no_grad` in an exported model; drop checks of values.

Contract: export puts such a region into a sub-graph of a higher-order operator, where the second trace would lose module calls
and source lines. `inline_modes` moves the operations into the graph with their metadata, between nodes that enter and leave the
mode.

Export loses a `no_grad` region in which a higher-order operator with a body runs (`torch.cond`, `scan`, `map`).
`note_grad_modes` marks such calls during export, and `check_grad_modes` raises for a marked call outside of a region.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp._torch.numbers_of_data import is_of_data
from graphpp._torch.symbols import SYMBOLIC
from graphpp._torch.this_thread import replaced
from graphpp.capture.source_lines import around_all, user_line
from graphpp.errors import CaptureError

_NOTE = "graphpp without grad"  # key in `meta["custom"]` for the user's line


def inline_modes(module: fx.GraphModule, grad_enabled: bool) -> fx.GraphModule:
    """Inline every autocast and grad-mode region, in place; `grad_enabled`: the grad mode around the module."""
    for node in list(module.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is torch.ops.higher_order.wrap_with_autocast:
            *arguments, body = node.args[:5]
            enter = aot.enter_autocast, tuple(arguments)
            _inline(module, node, body, node.args[5:], enter, (grad_enabled, grad_enabled))
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, body, *operands = node.args
            enter = aot.set_grad_enabled, (bool(enabled),)
            _inline(module, node, body, operands, enter, (bool(enabled), grad_enabled))
    return module


@contextlib.contextmanager
def note_grad_modes() -> Iterator[None]:
    """While open, mark higher-order operators that the forward calls without gradients."""
    original: Any = aot.HigherOrderOperator.__call__
    inside = False

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        marked = not inside and not torch.is_grad_enabled()  # inside, the operator's own code disables gradients
        note = aot.noted({_NOTE: user_line()}) if marked else contextlib.nullcontext()
        before, inside = inside, True
        try:
            with note:
                return original(*args, **kwargs)
        finally:
            inside = before

    with replaced(aot.HigherOrderOperator, "__call__", call):
        yield


def check_grad_modes(module: fx.GraphModule, grad_enabled: bool) -> None:
    """Raise `CaptureError` if a marked operator would run with gradients; `grad_enabled`: the grad mode around the module."""
    for node in module.graph.nodes:
        place = node.meta.get("custom", {}).get(_NOTE)
        if node.target is aot.set_grad_enabled:
            grad_enabled = bool(node.args[0])
        elif place is not None and grad_enabled and isinstance(node.target, aot.HigherOrderOperator):
            raise CaptureError(
                f"{node.target} runs under torch.no_grad() at {place}, where torch.export loses the no_grad: the operator "
                "would get a gradient. Run it outside of torch.no_grad(), and detach its results and those of the lines there."
            )


def run_under_autocast(module: fx.GraphModule, device_type: str) -> None:
    """Run all of `module` under the current autocast, in place. Its backward runs without autocast, as torch advises."""
    first = next(node for node in module.graph.nodes if node.op not in ("placeholder", "get_attr"))
    dtype, cached = torch.get_autocast_dtype(device_type), torch.is_autocast_cache_enabled()
    with module.graph.inserting_before(first):
        entered = module.graph.call_function(aot.enter_autocast, (device_type, dtype, True, cached))
    with module.graph.inserting_before(module.graph.output_node()):
        module.graph.call_function(aot.exit_autocast, (entered,))


def drop_value_checks(module: fx.GraphModule, *, of_data: bool) -> None:
    """Remove checks of values (`torch._check`), in place, and numbers that only the checks read.

    Checks of data-dependent numbers stay unless `of_data`. Other unused nodes stay: `batch_norm` writes its statistics,
    which its schema does not declare.
    """
    for node in reversed(list(module.graph.nodes)):
        node.meta.pop("unbacked_bindings", None)  # the next trace makes its own symbols
        if node.op != "call_function" or node.users:
            continue
        is_check = _checks(node.target) and (of_data or not _reads_data(node))
        if is_check or isinstance(node.meta.get("val"), SYMBOLIC):
            module.graph.erase_node(node)


def _reads_data(node: fx.Node) -> bool:
    """Whether a check reads a data-dependent number, even if the trace assumes that the check holds."""
    pending = list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        value = source.meta.get("val")
        if is_of_data(value):
            return True
        if not isinstance(value, torch.Tensor):
            pending += source.all_input_nodes
    return False


def _checks(target: Any) -> bool:
    """Whether an operator of torch returns nothing and writes nothing."""
    schema = getattr(target, "_schema", None)
    of_torch = getattr(target, "namespace", "") in ("aten", "prims")  # custom operators may have unlisted effects
    return of_torch and schema is not None and not schema.returns and not schema.is_mutable


def _inline(
    module: fx.GraphModule, call: fx.Node, held: Any, operands: Sequence[Any], enter: Any, grad_enabled: tuple[bool, bool]
) -> None:
    """Copy the region `held` into the graph in place of its call; `grad_enabled`: in the region and around it."""
    inner: Any = module.get_submodule(str(held.target))
    body = inline_modes(inner, grad_enabled[0])
    inputs = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, Any] = dict(zip(inputs, operands, strict=True))
    with module.graph.inserting_before(call):
        entered = module.graph.call_function(*enter)
        for node in body.graph.nodes:
            if node.op == "get_attr":
                name = f"{held.target}.{node.target}"
                copies[node] = module.graph.create_node("get_attr", name)
                copies[node].meta = dict(node.meta)
            elif node.op not in ("placeholder", "output"):
                copies[node] = module.graph.node_copy(node, copies.__getitem__)
        autocast = entered.target is aot.enter_autocast
        leave = (aot.exit_autocast, (entered,)) if autocast else (aot.set_grad_enabled, (grad_enabled[1],))
        left = module.graph.call_function(*leave)
    for node in (entered, left):
        node.meta |= around_all(body.graph.nodes)
    results = fx.node.map_arg(body.graph.output_node().args[0], copies.__getitem__)
    _replace(module.graph, call, results)


def _replace(graph: fx.Graph, call: fx.Node, results: Any) -> None:
    for user in list(call.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if call.users:
        call.replace_all_uses_with(results)
    graph.erase_node(call)
