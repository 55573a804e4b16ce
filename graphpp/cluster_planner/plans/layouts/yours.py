"""Price a layout: find the best plan among those that it leaves open, or say why none of them can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from math import prod

from graphpp.cluster_planner.costs.deployment import Deployment, check_degrees
from graphpp.cluster_planner.plans.find import Search, SearchSpace, rows_of, searched
from graphpp.cluster_planner.plans.found_plans import order
from graphpp.cluster_planner.plans.layouts.fixed import Fixed
from graphpp.cluster_planner.plans.layouts.layout import Layout, data_ranks
from graphpp.cluster_planner.plans.mesh_shapes import MeshLimits, MeshShape, mesh_shapes
from graphpp.cluster_planner.plans.predict_step import Prediction
from graphpp.cluster_planner.plans.refine.better_orders import placed_weight_grads, searched_order
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, ScheduleChoice
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.placement import usual_stages

_OF_HEADS = {
    "word_parts": "words are cut with tp 1, pp above 1 and more stages than ranks, for a head with a cross entropy after it",
    "logits_tokens": "logits are in pieces with tp 1 and whole words, for a head with a cross entropy after it",
}
_REFINED = {"placed": (placed_weight_grads, "weight gradients placed"), "searched": (searched_order, "searched order")}


def price_layout(
    request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace, layout: Layout
) -> tuple[Prediction, tuple[str, ...]]:
    """The prediction of a layout, over the cap if nothing of it fits, and sentences on what is priced in another way. Raises
    `ScheduleError` that says why the layout cannot run, and what to change."""
    _check_question(request, layout)
    fixed = Fixed.of(layout.choices, request.costs)
    _check_sizes(request, limits, fixed)
    values = fixed.values
    own = replace(
        space, fixed=fixed, sizes={name: each for name, each in space.sizes.items() if name not in values},
        recompute=fixed.among("recompute", space.recompute), offload=space.offload and "offload" not in values,
    )  # fmt: skip
    shapes = list(mesh_shapes(request.machines.gpus, request.batch, limits, fixed.sizes))
    _check_rows(request, shapes, own)
    try:
        search = searched(request, limits, cap, own)
    except ScheduleError as error:
        raise _refused(request, limits, shapes, own) or error from None
    return _refined(search, fixed)


def _refined(search: Search, fixed: Fixed) -> tuple[Prediction, tuple[str, ...]]:
    best = _best(list(search.found.values()), search.cap)
    if "refine" not in fixed.values or best.setting.schedule.order is not None:
        return best, ()
    refine, words = _REFINED[fixed.values["refine"]]
    search.refine(refine, best)
    of_name = fixed.values["refine"] == "placed"
    ordered = [
        each for each in search.found.values()
        if each.setting.schedule.order is not None and of_name == (each.setting.schedule.name != ORDER)
    ]  # fmt: skip
    missing = f"No {words} is faster than {best.setting.schedule}, which is priced."
    return (_best(ordered, search.cap), ()) if ordered else (best, (missing,))


def _best(found: Sequence[Prediction], cap: int) -> Prediction:
    return min(found, key=lambda each: (max(0, each.peak - cap), *order(each)))


def _check_question(request: PlanRequest, layout: Layout) -> None:
    """Raise if the layout is for another batch, length or dtype than those of the search."""
    costs = request.costs
    asked = (
        ("batch", layout.batch, request.batch, "batch={}"),
        ("tokens of a row", layout.tokens, request.tokens or None, "rows of {}"),
        ("dtype", layout.dtype, request.dtype or costs.dtype, "param_dtype=torch.{}"),
    )  # fmt: skip
    for name, its, ours, remedy in asked:
        if its is not None and ours is not None and its != ours:
            said = f"the layout has {its}, the search {ours}"
            raise ScheduleError(f"like: {name}: {said}: give {remedy.format(its)}, or another layout")
    if layout.float8 is not None and not (costs.float8 or "").startswith(f"{layout.float8} "):
        recipe = f'"{layout.float8}"'
        raise ScheduleError(f"like: the layout computes in float8 by the recipe {recipe}: give float8={recipe}")


def _check_sizes(request: PlanRequest, limits: MeshLimits, fixed: Fixed) -> None:
    sizes, gpus = fixed.sizes, request.machines.gpus
    left = data_ranks(gpus, **sizes)
    if left > 1 and len(sizes) == len(MeshShape().sizes()):
        remedy = f"take {left} times as many ranks, or {gpus // left} GPUs"
        raise ScheduleError(f"like: {MeshShape(**sizes)} makes {gpus // left} ranks of {gpus} GPUs: {remedy}")
    check_degrees(request.costs, Deployment(tp=sizes.get("tp", 1), ep=sizes.get("ep", 1), cp=sizes.get("cp", 1)))
    if fixed.values.get("offload") is not None and request.machines.device.host is None:
        device = request.machines.device.name
        raise ScheduleError(f"like: offload: {device} has no link to the host: give Device(host=Link(..))")
    per_rank = fixed.values.get("stages_per_rank", 1)
    stages = fixed.values.get("stages", sizes.get("pp", 1) * per_rank)
    if stages > limits.stages and not fixed.values.get("word_parts"):
        raise ScheduleError(f"like: {stages} stages: the model admits up to {limits.stages}: take fewer, or fewer a rank")


def _check_rows(request: PlanRequest, shapes: Sequence[MeshShape], space: SearchSpace) -> None:
    if any(next(rows_of(request, shape, space), None) for shape in shapes):
        if isinstance(space.fixed.values.get("keep"), int) and all(shape.shards == 1 for shape in shapes):
            raise ScheduleError("like: keep: nothing is sharded: give dp_shard or ep above 1, or keep all")
        return
    values, gpus = space.fixed.values, request.machines.gpus
    fixed = gpus // prod(values.get(name, 1) for name in ("pp", "tp", "cp"))
    data = sorted({shape.data_ranks for shape in shapes}) or [fixed]
    asked = [f"{values[name]} {noun}" for name, noun in (("microbatches", "microbatches"), ("rows", "rows")) if name in values]
    ranks = f"{'/'.join(map(str, data))} data ranks"
    raise ScheduleError(
        f"like: a batch of {request.batch} rows does not divide by {' x '.join([ranks, *asked])}: take a batch that is a "
        "multiple of their product, other rows, or fewer data ranks"
    )


def _refused(
    request: PlanRequest, limits: MeshLimits, shapes: Sequence[MeshShape], space: SearchSpace
) -> ScheduleError | None:
    """Why no schedule of the layout can run, by the schedule's own words; None if that is not the reason."""
    fixed = space.fixed
    for shape in shapes if "schedule" in fixed.values else ():
        for _, microbatches in islice(rows_of(request, shape, space), 1):
            name = fixed.values["schedule"]
            usual = usual_stages(SCHEDULES.get(name), shape.pp)
            stages = fixed.values.get("stages", shape.pp * fixed.values.get("stages_per_rank", usual // shape.pp))
            try:
                choice = ScheduleChoice(name, max(1, stages // shape.pp), fixed.values.get("group"), fixed.values.get("order"))
                choice.table(shape.pp, microbatches)
            except ScheduleError as error:
                return ScheduleError(f"like: {error}")
    said = next((why for name, why in _OF_HEADS.items() if fixed.values.get(name)), None)
    return None if said is None else ScheduleError(f"like: {said}: leave it out")
