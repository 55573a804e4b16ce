"""The fastest plans of a search refined: moved stages, other stages and placements, searched orders, recomputation in waits."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from graphpp.cluster_planner.plans.found_plans import order, rounded
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction
from graphpp.cluster_planner.plans.refine.better_orders import placed_weight_grads, recomputed_ahead, searched_order
from graphpp.cluster_planner.plans.refine.moved_stages import moved_stages
from graphpp.cluster_planner.plans.refine.placed_stages import placed_stages
from graphpp.cluster_planner.plans.search import Search

_MOVED = 3  # fastest plans whose stages are moved
_ORDERS = 3  # order searches: of other stages first, then of the fastest plans
_STAGES = 2  # fastest plans of different meshes that get other stages
_PLACED = 4096  # forwards, in all, of the plans whose weight gradients are placed


def move_stages(search: Search) -> None:
    """Give the fastest fitting plans the cuts under which they are faster."""
    for balanced, _ in sorted(search.fitting(), key=_order)[:_MOVED]:
        found = moved_stages(search.request, balanced, search.cap)
        if found is not None and rounded(found) < rounded(balanced):
            search.found[found.setting] = found


def search_orders(searches: Sequence[Search], *, other_stages: bool) -> None:
    """Add searched orders of the fastest fitting plans that are faster than the named schedule; of each search on one kind of
    device, too, where they may be the fastest. With `other_stages`, the fastest plans of different meshes get other stages.
    Weight gradients alone are placed in each plan that would be the best without its idle time, and recomputation in the
    fastest plans that recompute."""
    fitting = sorted((pair for search in searches for pair in search.fitting()), key=_order)
    soonest = min((each.seconds.total for each, _ in fitting), default=inf)
    of_mesh = {named.setting.shape: (named, search) for named, search in reversed(fitting)}
    orders = _ORDERS
    for named, search in sorted(of_mesh.values(), key=_order)[: _STAGES * other_stages]:
        orders -= search.refine(placed_stages, named)
    alone = [
        pair
        for search in searches
        for pair in [each for each in fitting if each[1] is search and len(search.request.machines.groups) == 1][:_ORDERS]
        if _may_win(pair[0], soonest)
    ]
    for named, search in {id(pair[0]): pair for pair in (*fitting[:orders], *alone)}.values():
        search.refine(searched_order, named)
    soonest = min((each.seconds.total for search in searches for each, _ in search.fitting()), default=inf)
    left = dict.fromkeys(map(id, searches), _PLACED)
    for named, search in fitting:
        forwards = named.setting.stages * named.setting.microbatches
        if forwards <= left[id(search)] and named.setting.offload is None and _may_win(named, soonest):
            search.refine(placed_weight_grads, named)
            left[id(search)] -= forwards
    again = [pair for search in searches for pair in search.fitting() if pair[0].setting.recompute is not None]
    for named, search in sorted(again, key=_order)[:_ORDERS]:
        search.refine(recomputed_ahead, named)


def _may_win(named: Prediction, soonest: float) -> bool:
    """Whether a plan without its idle time would be faster."""
    return named.seconds.total - named.seconds.bubble < soonest


def _order(pair: tuple[Prediction, Search]) -> tuple[object, ...]:
    return order(pair[0])
