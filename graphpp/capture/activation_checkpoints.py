"""`torch.utils.checkpoint` in the model: mark the operations that its checkpoints recompute in the backward.

Contract
--------
- While `record_checkpoints` is open, a checkpointed call runs like any other call, and both traces mark its operations with its
  number; of nested calls the outermost counts. `mark_checkpoints` then writes `meta["checkpoint"]` and `meta["kept"]` (see
  `passes/graph/joint_graph.py`).
- A recomputed operation always repeats its random numbers. Under `no_grad` and in evaluation a checkpoint has no effect.
- The policy of a selective checkpoint (`context_fn`) is called once per operation of the traced forward, in order. Values to
  offload are saved. Any other context is entered around the forward only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot, autograd
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.recompute.backward_needs import MayRecompute, RegionOf

Policy = Callable[..., Any]
_KEY = "graphpp.checkpoint"


@dataclass
class CheckpointedCalls:
    """The checkpointed calls of one capture: their number, and the policies of selective ones by call number."""

    calls: int = 0
    policies: dict[int, Policy] = field(default_factory=dict)
    _depth: int = 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Open around the forward of a checkpointed call: numbers it and marks its operations."""
        outermost = self._depth == 0
        self.calls, self._depth = self.calls + outermost, self._depth + 1
        try:
            with aot.noted({_KEY: self.calls - 1}) if outermost else contextlib.nullcontext():
                yield
        finally:
            self._depth -= 1

    def select(self, policy: Policy) -> None:
        """Note the policy of the selective checkpoint that has just begun, unless it is nested."""
        if self._depth == 1:
            self.policies[self.calls - 1] = policy

    def run(self, function: Callable[..., Any], keep_random_state: bool, *args: Any) -> Any:
        """Run a reentrant checkpoint: like eager, without gradients unless an argument requires grad."""
        requires_grad = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with self.call() if requires_grad and torch.is_grad_enabled() else torch.no_grad():
            return function(*args)


@contextlib.contextmanager
def record_checkpoints(checkpoints: CheckpointedCalls) -> Iterator[None]:
    """While open, mark operations of checkpointed calls, and note policies in `checkpoints`."""
    with autograd.checkpoints_replaced(checkpoints.run, checkpoints.call, checkpoints.select):
        yield


def mark_checkpoints(graph: fx.Graph, checkpoints: CheckpointedCalls) -> None:
    """Write the marks into the joint graph's forward nodes; calls are numbered by their first operation."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        call = checkpointed_call(node)
        if call is not None and node.op == "call_function" and not node.meta["backward"]:
            node.meta["checkpoint"] = numbers.setdefault(call, len(numbers))
            node.meta["kept"] = call in checkpoints.policies and _saves(checkpoints.policies[call], node)


def checkpointed_call(node: fx.Node) -> int | None:
    """The number of the checkpointed call around a traced operation, else None; call before `mark_checkpoints`."""
    number: int | None = (node.meta.get("custom") or {}).get(_KEY)
    return number


def _saves(policy: Policy, node: fx.Node) -> bool:
    """Whether the policy saves the operation's value; the policy gets fake tensors."""
    if not isinstance(node.target, aot.Operator) or node.target in autograd.UNSELECTED:
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    answer = policy(autograd.selective_context(node.meta["val"]), node.target, *args, **kwargs)
    return answer if isinstance(answer, bool) else not answer.name.endswith("_RECOMPUTE")


def count_checkpointed_calls(joint: JointGraph) -> int:
    """The number of checkpointed calls with an operation in the graph."""
    return len({node.meta["checkpoint"] for node in joint.computed() if "checkpoint" in node.meta})


def add_checkpoint_regions(
    joint: JointGraph, region_of: RegionOf | None, may_recompute: MayRecompute
) -> tuple[RegionOf | None, MayRecompute]:
    """Add the model's own checkpoints to the regions of `memory.recompute`; returns both functions extended.

    `region_of`: a node's region or None; `may_recompute`: whether a value in a region may be recomputed. Of a region and a
    checkpointed call, one inside the other, the outer one counts.
    """
    enclosing = _enclosing_regions(joint, region_of) if joint.training else {}
    if not enclosing:
        return region_of, may_recompute

    def extended_region_of(node: fx.Node) -> Hashable | None:
        region, call = region_of(node) if region_of is not None else None, node.meta.get("checkpoint")
        outer = call is None or (region is not None and region == enclosing[call])
        return region if outer else ("checkpoint", call)

    def extended_may_recompute(node: fx.Node) -> bool:
        by_checkpoint = "checkpoint" in node.meta and not node.meta["kept"]
        return by_checkpoint or (region_of is not None and region_of(node) is not None and may_recompute(node))

    return extended_region_of, extended_may_recompute


def _enclosing_regions(joint: JointGraph, region_of: RegionOf | None) -> dict[int, Hashable | None]:
    """For each checkpointed call, the region that contains all its operations, or None."""
    found: dict[int, set[Hashable | None]] = {}
    for node in joint.computed():
        if "checkpoint" in node.meta and not node.meta["backward"]:
            found.setdefault(node.meta["checkpoint"], set()).add(region_of(node) if region_of is not None else None)
    return {call: next(iter(regions)) if len(regions) == 1 else None for call, regions in found.items()}
