"""Trace two calls of each group of equal modules, and copy the others; or say in a line of the log why not.

Contract: the exported graph is as before afterwards. Nothing here runs code of the user, so an attempt that fails leaves no
trace, and the caller traces the exported graph as it is. A model that can be captured without copies can be captured with them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch.numbers_of_data import is_of_data
from graphpp.capture.explain_errors import causes
from graphpp.capture.repeats.equal_modules import RepeatedModules, repeated_modules
from graphpp.capture.repeats.exported_calls import ExportedCall, exported_calls
from graphpp.capture.repeats.replace_calls import replace_calls
from graphpp.capture.repeats.stand_ins import CallTable, DifferentError
from graphpp.passes.graph.joint_graph import JointGraph

_LOG = logging.getLogger("graphpp")
_FEWEST = 3  # calls of one kind, of which two are traced


def copied_graph(
    trace: Callable[[CallTable], JointGraph],
    model: nn.Module,
    module: fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    mode: Any,
) -> JointGraph | None:
    """The joint graph that `trace` makes of the exported `module`, with copies of calls; None if no call can be copied.

    `trace` takes the calls for which operators stand in the graph of `module`. `inputs`: fake tensors of `mode`.
    """
    groups = repeated_modules(model)
    if not groups or any(is_of_data(node.meta.get("val")) for node in module.graph.nodes):
        return None
    exported = module.graph
    try:
        graph, table = _replaced(module, groups, inputs, mode)
        if not table.kinds:
            return None
        module.graph = graph
        return trace(table)
    except Exception as error:  # the model can still be captured; what is wrong with it, a full trace tells
        refused = next((cause for cause in causes(error) if isinstance(cause, DifferentError)), error)
        _LOG.info("all modules are traced one by one: %s", (str(refused) or repr(refused)).splitlines()[0])
        return None
    finally:
        module.graph = exported


def _replaced(
    module: fx.GraphModule, groups: Sequence[RepeatedModules], inputs: Sequence[torch.Tensor], mode: Any
) -> tuple[fx.Graph, CallTable]:
    """The graph with operators in place of calls, and without those of groups that are refused."""
    calls = exported_calls(module, groups)
    number = Counter(call.kind for call in calls if call.strange is None)
    chosen = [call for call in calls if call.strange is None and number[call.kind] >= _FEWEST]
    for group in groups:
        if not any(call.group is group for call in chosen):
            _log(group, _why_unlike([call for call in calls if call.group is group]))
    while True:
        try:
            graph, table, others = replace_calls(module, chosen, inputs, mode)
            for group, reason in others.items():
                _log(group, reason)
            return graph, table
        except DifferentError as error:
            refused = error.group
            _log(refused, str(error))
            chosen = [call for call in chosen if call.group is not refused]


def _why_unlike(calls: Sequence[ExportedCall]) -> str:
    strange = next((call for call in calls if call.strange is not None), None)
    if strange is not None:
        return f"{strange.fqn} {strange.strange}"
    if len(calls) < _FEWEST:
        return "the forward calls too few of them"
    other = next(call for call in calls if call.kind != calls[0].kind)
    return f"{other.fqn} runs other operators than {calls[0].fqn}"


def _log(group: RepeatedModules, reason: str) -> None:
    first, *others = group.members
    _LOG.info("%s and %d modules like it are traced one by one: %s", first, len(others), reason)
