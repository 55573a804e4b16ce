"""`torch.utils.checkpoint` in the model: mark the operations that the model's own checkpoints recompute in the backward.

Contract
--------
- While `record_checkpoints` is open, a checkpointed call runs like any other call, and its operations carry the call's number
  through both traces; of nested calls the outermost counts. `mark_checkpoints` then writes `meta["checkpoint"]` and
  `meta["kept"]` (see `passes/graph/joint_graph.py`). Checkpoints leave no other trace in the graph.
- Reentrant and non-reentrant checkpoints with any arguments are supported. `preserve_rng_state`, `determinism_check`, `debug`
  and `early_stop` have no effect: a recomputed operation always repeats its random numbers. Under `no_grad` and in evaluation
  a checkpoint has no effect.
- The policy of a selective checkpoint (`context_fn`) is asked once per operation of the traced forward, in order; a value
  that it would save or offload is saved. Any other context is entered around the forward only, and all values inside are
  recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.recompute.backward_needs import MayRecompute
from graphpp.passes.recompute.recompute_regions import RegionOf

Policy = Callable[..., Any]
_KEY = "graphpp.checkpoint"


@dataclass
class CheckpointedCalls:
    """The checkpointed calls of one capture: how many, and the policies of those that save a selection."""

    calls: int = 0
    policies: dict[int, Policy] = field(default_factory=dict)
    _depth: int = 0

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around the forward of a checkpointed call."""
        outermost = self._depth == 0
        self.calls, self._depth = self.calls + outermost, self._depth + 1
        try:
            with aot.noted({_KEY: self.calls - 1}) if outermost else contextlib.nullcontext():
                yield
        finally:
            self._depth -= 1

    def select(self, policy: Policy) -> None:
        """The call that has just begun saves what `policy` says."""
        if self._depth == 1:
            self.policies[self.calls - 1] = policy

    def run(self, function: Callable[..., Any], keep_random_state: bool, *args: Any) -> Any:
        """A reentrant checkpoint: the same numbers, and no gradient where eager has none."""
        reached = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with self.call() if reached and torch.is_grad_enabled() else torch.no_grad():
            return function(*args)


@contextlib.contextmanager
def record_checkpoints(checkpoints: CheckpointedCalls) -> Iterator[None]:
    """While open, checkpointed calls mark what they run."""
    with aot.checkpoints_replaced(checkpoints.run, checkpoints.call, checkpoints.select):
        yield


def mark_checkpoints(graph: fx.Graph, checkpoints: CheckpointedCalls) -> None:
    """Write the marks on the nodes of the joint trace; calls are numbered in the order of their first operation."""
    numbers: dict[int, int] = {}
    for node in graph.nodes:
        call = (node.meta.get("custom") or {}).get(_KEY)
        if call is not None and node.op == "call_function" and not node.meta["backward"]:
            node.meta["checkpoint"] = numbers.setdefault(call, len(numbers))
            node.meta["kept"] = call in checkpoints.policies and _saves(checkpoints.policies[call], node)


def _saves(policy: Policy, node: fx.Node) -> bool:
    """What a policy says about an operation; it sees tensors without data."""
    if not isinstance(node.target, aot.Operator) or node.target in aot.UNSELECTED:
        return False
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    said = policy(aot.selective_context(node.meta["val"]), node.target, *args, **kwargs)
    return said if isinstance(said, bool) else not said.name.endswith("_RECOMPUTE")


def count_checkpointed_calls(joint: JointGraph) -> int:
    """How many checkpointed calls of the model hold."""
    return len({node.meta["checkpoint"] for node in joint.computed() if "checkpoint" in node.meta})


def add_checkpoint_regions(
    joint: JointGraph, region: RegionOf | None, chosen: MayRecompute
) -> tuple[RegionOf | None, MayRecompute]:
    """The regions that are computed again and what of them: those given, and the model's own where none of these is around.

    Of a region given and a checkpoint that lie one in the other, the outer one counts.
    """
    around = _around(joint, region) if joint.training else {}
    if not around:
        return region, chosen

    def outer(node: fx.Node) -> Hashable | None:
        given, own = region(node) if region is not None else None, node.meta.get("checkpoint")
        inside = own is None or (given is not None and given == around[own])
        return given if inside else ("checkpoint", own)

    def again(node: fx.Node) -> bool:
        by_the_model = "checkpoint" in node.meta and not node.meta["kept"]
        return by_the_model or (region is not None and region(node) is not None and chosen(node))

    return outer, again


def _around(joint: JointGraph, region: RegionOf | None) -> dict[int, Hashable | None]:
    """For each checkpointed call the region given that has all of its operations; None: there is none."""
    found: dict[int, set[Hashable | None]] = {}
    for node in joint.computed():
        if "checkpoint" in node.meta and not node.meta["backward"]:
            found.setdefault(node.meta["checkpoint"], set()).add(region(node) if region is not None else None)
    return {own: next(iter(regions)) if len(regions) == 1 else None for own, regions in found.items()}
