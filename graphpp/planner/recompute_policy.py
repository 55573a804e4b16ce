"""Translate a `Recompute` option into operations of a captured graph. Raises `GraphPPError` for an FQN that is never called."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from torch import fx

from graphpp.arguments import FLAG, callback
from graphpp.errors import GraphPPError
from graphpp.options.recompute import Recompute
from graphpp.options.split import ModuleCall
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.op_costs import Cost, OpCosts, is_cheap, is_heavy
from graphpp.passes.recompute.backward_needs import MayRecompute, RegionOf, always
from graphpp.passes.recompute.rematerialize import RecomputeBudget
from graphpp.passes.stage.split_weight_grad import never
from graphpp.planner.layers import repeated_layers

_WORTH = 8  # bytes of memory traffic per saved byte avoided: about three pointwise operations in sequence


def region_of(option: Recompute, calls: Sequence[ModuleCall]) -> RegionOf:
    """The region of an operation: the outermost chosen call around it; None if its value is saved."""
    chosen = {call.fqn for call in _called(option, calls)}

    def region(node: fx.Node) -> Hashable | None:
        return next((call for call in node.meta["calls"] if call in chosen), None)

    return region


def _called(option: Recompute, calls: Sequence[ModuleCall]) -> Sequence[ModuleCall]:
    if option.layers is None:
        return repeated_layers(calls) or [call for call in calls if call.module and "." not in call.module]
    unknown = sorted(set(option.layers) - {call.module for call in calls} - {call.fqn for call in calls})
    if unknown:
        names = ", ".join(unknown)
        raise GraphPPError(f"memory.recompute: names {names}, which the model never calls: give modules whose forward runs")
    return [call for call in calls if call.module in option.layers or call.fqn in option.layers]


def may_recompute(option: Recompute) -> MayRecompute:
    """Which operations of the regions may run a second time."""
    if option.nodes is None:
        return always
    if isinstance(option.nodes, str):  # no contraction (matrix product, convolution, attention), which is worth saving
        return lambda node: not is_heavy(node) and not is_collective(node)
    return callback(GraphPPError, "memory.recompute", FLAG, option.nodes)


def recompute_budget(option: Recompute, region: RegionOf | None, device_type: str, cost: Cost | None) -> RecomputeBudget | None:
    """The terms on which single values are recomputed; a given `fraction` applies only with regions."""
    costs = OpCosts.of(device_type)
    worth = _WORTH / costs.memory
    if region is not None and option.fraction is not None:
        return RecomputeBudget(worth, cost or costs, option.fraction, region, may_recompute(option))
    return RecomputeBudget(worth, costs, may_recompute=may_recompute(option)) if option.free else None


def may_repeat_in_weight_grad(option: Recompute) -> MayRecompute:
    """Which operations of I may run a second time in W."""
    return is_cheap if option.weight_grad else never
