"""The ordered list of passes that turns a joint graph into stage programs.

`_Passes.run` runs every pass, verifies a joint graph after it, and calls one hook with the result, for dumps and timing. Dumps
print the names of the functions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.joint.assign_stages import assign_stages
from graphpp.passes.joint.clean_up import clean_up
from graphpp.passes.joint.gradient_sums import delay_gradient_sums, split_tied_gradients
from graphpp.passes.joint.key_dropout_and_random_ops import key_random_ops
from graphpp.passes.joint.snapshot_buffers import snapshot_buffers
from graphpp.passes.joint.views import merge_views, relax_views
from graphpp.passes.recompute.backward_needs import MayRecompute, RegionOf, always
from graphpp.passes.recompute.recompute_regions import recompute_regions
from graphpp.passes.recompute.rematerialize import RecomputeBudget, choose_recomputed, rematerialize
from graphpp.passes.stage.carry_numbers import carry_numbers, has_numbers_of_data
from graphpp.passes.stage.cut_stages import cut_stages
from graphpp.passes.stage.emit import emit
from graphpp.passes.stage.fuse_grad_accumulation import ProductWorkspace, fuse_grad_accumulation
from graphpp.passes.stage.gather_layers import ShardedLayers, follows_parameters, gather_layers
from graphpp.passes.stage.hoist_per_step import find_step_invariants, hoist_per_step
from graphpp.passes.stage.split_recompute import split_recompute
from graphpp.passes.stage.split_weight_grad import never, split_weight_grad
from graphpp.runtime.program import PipelineProgram

P = ParamSpec("P")
T = TypeVar("T", JointGraph, StagedGraphs, PipelineProgram)


@dataclass(frozen=True)
class PassResult:
    name: str
    seconds: float
    result: JointGraph | StagedGraphs | PipelineProgram


Hook = Callable[[PassResult], None]


@dataclass(frozen=True)
class LoweringOptions:
    """The passes that a plan switches on, and their settings.

    `split_backward`: every stage also gets I and W. `weight_grad_may_recompute`: the nodes of I that W may compute again.
    `region_of`: the region of a forward operation; the backward recomputes whole regions. `may_recompute`: the operations of a
    region that may run again. `recompute_budget`: the terms of recomputing single values among the values still saved after
    `region_of`. `fuse_grad_accumulation`: a matrix product that is a gradient is added directly into the gradient's sum over
    microbatches; `product_workspace`: the bytes that its kernel takes besides the sum (None: none). `hoist_per_step`: values
    that depend only on parameters, buffers and constants are computed once per step; without `hoist_cheap` only those of
    parameters that need a reduction or a product, such as weights in float8. `layers`: parameters are sharded, and
    programs gather one layer at a time; then values that depend on parameters are not hoisted. `shared_by`: the name of the
    group of ranks that share each layer; gradient sums over this group leave the graph, except with `layers`.
    `recompute_ahead`: every stage gets R, whose values B, I and W read.
    """

    split_backward: bool = False
    weight_grad_may_recompute: MayRecompute = never
    region_of: RegionOf | None = None
    may_recompute: MayRecompute = always
    recompute_budget: RecomputeBudget | None = None
    fuse_grad_accumulation: bool = False
    hoist_per_step: bool = False
    layers: ShardedLayers | None = None
    shared_by: str | None = None
    product_workspace: ProductWorkspace | None = None
    hoist_cheap: bool = True
    recompute_ahead: bool = False


def lower(
    joint: JointGraph,
    starts: Sequence[int],
    hook: Hook = lambda result: None,
    options: LoweringOptions = LoweringOptions(),
) -> PipelineProgram:
    """Joint graph -> stage programs; stage s begins at position `starts[s]` of the forward. Changes `joint` in place.

    Raises `CaptureError` if a buffer is written in one stage and read in another.
    """
    return lower_assigned(assigned(joint, starts, hook, options), len(starts), hook, options)


def assigned(
    joint: JointGraph,
    starts: Sequence[int],
    hook: Hook = lambda result: None,
    options: LoweringOptions = LoweringOptions(),
) -> JointGraph:
    """The first half of `lower`: assigns stages. Changes `joint` in place."""
    passes = _Passes(hook)
    joint = passes.run(clean_up, joint)
    joint = passes.run(snapshot_buffers, joint)
    joint = passes.run(key_random_ops, joint)
    joint = passes.run(assign_stages, joint, starts)
    joint = passes.run(merge_views, joint)
    joint = passes.run(relax_views, joint)
    joint = passes.run(split_tied_gradients, joint)
    if options.shared_by is not None and options.layers is None:
        joint = passes.run(delay_gradient_sums, joint, options.shared_by)
    if options.hoist_per_step or options.layers is not None:
        joint = passes.run(find_step_invariants, joint, options.hoist_cheap or options.layers is not None)
    return joint


def lower_assigned(
    joint: JointGraph, stages: int, hook: Hook = lambda result: None, options: LoweringOptions = LoweringOptions()
) -> PipelineProgram:
    """The second half of `lower`, for a joint graph with stages; `joint` is not changed, so it can be lowered several times."""
    joint, staged = staged_graphs(joint, stages, hook, options)
    return _Passes(hook).run(emit, joint, staged)


def staged_graphs(
    joint: JointGraph, stages: int, hook: Hook = lambda result: None, options: LoweringOptions = LoweringOptions()
) -> tuple[JointGraph, StagedGraphs]:
    """The phase graphs of the stages before programs are emitted, and the joint graph that was cut; `joint` is not changed."""
    passes, region_of, budget, layers = _Passes(hook), options.region_of, options.recompute_budget, options.layers
    if region_of is not None and joint.training:
        joint = passes.run(recompute_regions, joint.copy(), region_of, options.may_recompute)
    if budget is not None and joint.training:
        joint = passes.run(_rematerialize, joint.copy(), stages, budget)
    if has_numbers_of_data(joint):
        joint = passes.run(carry_numbers, joint.copy())
    staged = passes.run(cut_stages, joint, stages)
    if options.hoist_per_step:
        staged = passes.run(hoist_per_step, joint, staged, follows_parameters(joint) if layers else ())
    if options.recompute_ahead and joint.training:
        staged = passes.run(split_recompute, joint, staged)
    if options.split_backward and joint.training:
        may_recompute = options.weight_grad_may_recompute if layers is None else _with_step_invariants(options)
        staged = passes.run(split_weight_grad, joint, staged, may_recompute)
    if options.fuse_grad_accumulation and joint.training:
        staged = passes.run(fuse_grad_accumulation, staged, options.product_workspace)
    if layers is not None:
        staged = passes.run(gather_layers, staged, layers)
    return joint, staged


def _with_step_invariants(options: LoweringOptions) -> MayRecompute:
    """W may also compute step-invariant values again (casts of parameters), from parameters that it gathers.

    I may not save these values for W, because they would keep whole parameters alive.
    """
    return lambda node: bool(node.meta.get("step_invariant")) or options.weight_grad_may_recompute(node)


def _rematerialize(joint: JointGraph, stages: int, budget: RecomputeBudget) -> JointGraph:
    return rematerialize(joint, choose_recomputed(joint, stages, budget))


@dataclass
class _Passes:
    hook: Hook

    def run(self, step: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        began = time.perf_counter()
        result = step(*args, **options)
        if isinstance(result, JointGraph):
            result.module.recompile()
            verify_joint_graph(result)
        self.hook(PassResult(step.__name__.removeprefix("_"), time.perf_counter() - began, result))
        return result
