"""The recipe: the ordered list of passes that turns a joint graph into stage programs.

Read `lower` from top to bottom and you know the compiler. Between any two passes one hook sees the result: verification,
dumps and timing hang there and nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from graphpp.passes.graph.joint_graph import JointGraph, verify
from graphpp.passes.graph.stage_graphs import Cut
from graphpp.passes.joint.assign_stages import assign
from graphpp.passes.joint.clean_up import clean_up
from graphpp.passes.joint.key_random_ops import randomize
from graphpp.passes.joint.merge_views import merge_views
from graphpp.passes.joint.relax_views import relax_views
from graphpp.passes.joint.snapshot_buffers import snapshot
from graphpp.passes.joint.split_tied_gradients import accumulate
from graphpp.passes.recompute.choose_saved import Savings, computed_again
from graphpp.passes.recompute.recompute_regions import Chosen, Region, every, recompute
from graphpp.passes.recompute.rematerialize import rematerialize
from graphpp.passes.stage.cut_stages import cut
from graphpp.passes.stage.emit import emit
from graphpp.passes.stage.fuse_grad_accumulation import accumulate_products
from graphpp.passes.stage.hoist_per_step import find_prepared, prepare
from graphpp.passes.stage.split_weight_grad import Rerun, never, split_weight_grad
from graphpp.runtime.program import PipelineProgram

T = TypeVar("T", JointGraph, Cut, PipelineProgram)


@dataclass(frozen=True)
class Passed:
    """What a hook sees: which pass ran, for how long (seconds), and its result."""

    name: str
    seconds: float
    result: JointGraph | Cut | PipelineProgram


Hook = Callable[[Passed], None]


@dataclass(frozen=True)
class Choices:
    """What a plan leaves open: whether I and W stand beside B, and what W may run again; what is recomputed.

    `region`, `chosen`: what is recomputed by regions; `savings`: on what terms single values are, of those still saved then.
    `fused`: products are written into the sums of gradients. `prepare`: what depends on parameters alone is made once a step.
    """

    split_backward: bool = False
    rerun: Rerun = never
    region: Region | None = None
    chosen: Chosen = every
    savings: Savings | None = None
    fused: bool = False
    prepare: bool = False


def lower(
    joint: JointGraph, starts: Sequence[int], hook: Hook = lambda passed: None, choices: Choices = Choices()
) -> PipelineProgram:
    """Joint graph -> stage programs; stage s begins at position `starts[s]` of the forward. Changes `joint` in place."""
    steps = _Steps(hook)
    joint = steps.run("clean_up", lambda: clean_up(joint))
    joint = steps.run("snapshot", lambda: snapshot(joint))
    joint = steps.run("randomize", lambda: randomize(joint))
    joint = steps.run("assign", lambda: assign(joint, starts))
    joint = steps.run("merge_views", lambda: merge_views(joint))
    joint = steps.run("relax_views", lambda: relax_views(joint))
    joint = steps.run("accumulate", lambda: accumulate(joint))
    if choices.prepare:
        joint = steps.run("find_prepared", lambda: find_prepared(joint))
    return finish(joint, len(starts), hook, choices)


def finish(
    joint: JointGraph, stages: int, hook: Hook = lambda passed: None, choices: Choices = Choices()
) -> PipelineProgram:
    """The second half of the recipe, on a joint graph that `lower` has prepared and that stays as it is."""
    steps, region, savings = _Steps(hook), choices.region, choices.savings
    if region is not None and joint.training:
        joint = steps.run("recompute", lambda: recompute(joint.copy(), region, choices.chosen))
    if savings is not None and joint.training:
        joint = steps.run("rematerialize", lambda: _rematerialized(joint.copy(), stages, savings))
    pieces = steps.run("cut", lambda: cut(joint, stages))
    if choices.prepare:
        pieces = steps.run("prepare", lambda: prepare(joint, pieces))
    if choices.split_backward and joint.training:
        pieces = steps.run("split_weight_grad", lambda: split_weight_grad(joint, pieces, choices.rerun))
    if choices.fused and joint.training:
        pieces = steps.run("accumulate_products", lambda: accumulate_products(pieces))
    return steps.run("emit", lambda: emit(joint, pieces))


def _rematerialized(joint: JointGraph, stages: int, terms: Savings) -> JointGraph:
    return rematerialize(joint, computed_again(joint, stages, terms))


@dataclass
class _Steps:
    hook: Hook

    def run(self, name: str, step: Callable[[], T]) -> T:
        began = time.perf_counter()
        result = step()
        if isinstance(result, JointGraph):
            result.module.recompile()
            verify(result)
        self.hook(Passed(name, time.perf_counter() - began, result))
        return result
