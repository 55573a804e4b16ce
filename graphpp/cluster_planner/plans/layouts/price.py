"""Read a layout in any of its forms, and price it: the best plan among those that it leaves open, or why none can run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import islice
from math import prod
from pathlib import Path

from graphpp.arguments import one_of, require
from graphpp.cluster_planner.costs.deployment import Deployment, check_degrees
from graphpp.cluster_planner.plans.find import SearchSpace, rows_of, searched
from graphpp.cluster_planner.plans.found_plans import TrainingPlans, order
from graphpp.cluster_planner.plans.layouts.fixed import Fixed
from graphpp.cluster_planner.plans.layouts.other_systems import (
    Context,
    Layout,
    data_ranks,
    read_deepspeed,
    read_megatron,
    read_torchtitan,
)
from graphpp.cluster_planner.plans.layouts.own_words import read_own_words
from graphpp.cluster_planner.plans.mesh_shapes import SIZES, MeshLimits, MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import ScheduleError
from graphpp.from_json import document
from graphpp.units import spell_bytes

LikeForm = str | Path | Mapping[str, object] | TrainingPlan | PlanSetting
_LIKE = one_of(str, Path, Mapping, TrainingPlan, PlanSetting, takes=(
    "a layout in words, Megatron-LM's arguments, a file of torchtitan, DeepSpeed or a plan, choices by name, or a plan"
))  # fmt: skip
_OF_HEADS = {
    "word_parts": "words are cut with tp 1, pp above 1, more stages than ranks",
    "logits_tokens": "logits are in pieces with tp 1, whole words",
}


def read_like(like: LikeForm, context: Context) -> Layout:
    """The layout. A text that names a file is read from there. Raises `ScheduleError`, `GraphPPError` for other forms."""
    require(ScheduleError, "like", _LIKE, like)
    if isinstance(like, TrainingPlan):
        return _of_plan(like)
    if isinstance(like, PlanSetting):
        return Layout(_of_setting(like))
    return Layout(like) if isinstance(like, Mapping) else _of_text(_text(like), context)


def _text(like: str | Path) -> str:
    if not isinstance(like, Path) and not re.search(r"\.(json|toml|sh|txt|args)\s*$", like):
        return like
    try:
        return Path(str(like).strip()).read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        said = getattr(fault, "strerror", None) or fault
        raise ScheduleError(f"like: {like}: {said}: name a file that can be read") from fault


def _of_text(text: str, context: Context) -> Layout:
    if text.lstrip().startswith("{"):
        given = document(text, "like")
        of_plan = {"plans", "setting"} & given.keys()
        return _of_plan(TrainingPlans.from_json(text).best) if of_plan else read_deepspeed(given, context)
    if re.search(r"(^|\s)--[a-z]", text):
        return read_megatron(text, context)
    return read_torchtitan(text, context) if re.search(r"^\s*\[\w", text, re.MULTILINE) else read_own_words(text)


def _of_plan(plan: TrainingPlan) -> Layout:
    if plan.measured:
        raise ScheduleError("like: a plan of measured costs has no mesh for machines: take a plan of a model")
    split = {} if plan.setting.word_parts or not plan.split else {"split": plan.split}
    return Layout({**_of_setting(plan.setting), **split}, (), {"batch": plan.batch, "tokens": plan.tokens, "dtype": plan.dtype})


def _of_setting(setting: PlanSetting) -> dict[str, object]:
    found, schedule = asdict(setting), asdict(setting.schedule)
    del found["schedule"]
    optional = {"recomputed": found.pop("recomputed"), **{name: schedule.pop(name) for name in ("order", "stages")}}
    return {
        **found.pop("shape"), **found, "schedule": schedule.pop("name"), **schedule,
        **{name: each for name, each in optional.items() if each is not None},
    }  # fmt: skip


def price_layout(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace, layout: Layout) -> Prediction:
    """The prediction of a layout, over the cap if nothing of it fits. Raises `ScheduleError` that says why the layout cannot
    run, and what to change."""
    _check_question(request, layout.question)
    fixed = Fixed.of(layout.choices, request.costs)
    _check_sizes(request, limits, fixed)
    own = replace(
        space, fixed=fixed, sizes={name: each for name, each in space.sizes.items() if name not in fixed.values},
        recompute=fixed.among("recompute", space.recompute), offload=space.offload and "offload" not in fixed.values,
    )  # fmt: skip
    shapes = list(filter(fixed.admits, request.shapes(limits, fixed.sizes)))
    _check_rows(request, shapes, own)
    try:
        found = list(searched(request, limits, cap, own).found.values())
    except ScheduleError as error:
        raise _refused(request, shapes, own) or error from None
    host, least = request.machines.host_memory, min(each.host for each in found)
    if least > host:
        said = f"a machine has {spell_bytes(host)} of memory for offloaded values, and the layout takes {spell_bytes(least)}"
        raise ScheduleError(f"like: offload: {said}: offload less, or give Machines(host_memory=)")
    found = [each for each in found if each.host <= host]
    return min(found, key=lambda each: (max(0, each.over(cap)), *order(each)))


def _check_question(request: PlanRequest, question: Mapping[str, object]) -> None:
    """Raise if the layout is for another batch, length or dtype than those of the search."""
    ours = {
        "batch": request.batch, "tokens": request.tokens, "dtype": request.dtype or request.costs.dtype,
        "float8": (request.costs.float8 or "None").split(" ")[0],
    }  # fmt: skip
    remedies = {"batch": "batch={}", "tokens": "rows of {} tokens", "dtype": "param_dtype=torch.{}", "float8": 'float8="{}"'}
    for name, its in question.items():
        if its and ours[name] and its != ours[name]:
            remedy = remedies[name].format(its)
            said = f"the layout has {its}, the search {ours[name]}"
            raise ScheduleError(f"like: {name}: {said}: give {remedy}, or another layout")


def _check_sizes(request: PlanRequest, limits: MeshLimits, fixed: Fixed) -> None:
    values, sizes, machines = fixed.values, fixed.sizes, request.machines
    left = data_ranks(machines.gpus, **sizes)
    if left > 1 and len(sizes) == len(SIZES):
        said = f"{machines.gpus // left} ranks of {machines.gpus} GPUs"
        shape = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        raise ScheduleError(f"like: {shape} makes {said}: take {left} times as many ranks, or fewer GPUs")
    tp, ep, cp = (sizes.get(name, 1) for name in ("tp", "ep", "cp"))
    check_degrees(request.costs, Deployment(tp=tp, ep=ep, cp=cp, folded=values.get("folded", False)))
    if values.get("folded") and {"cp", "tp"} <= sizes.keys() and sizes["cp"] * sizes["tp"] == 1:
        raise ScheduleError("like: experts are spread over cp and tp too where one of these has several ranks: leave it out")
    if values.get("offload") is not None and machines.host is None:
        name = next(each.device.name for each in machines.groups if each.host is None)
        raise ScheduleError(f"like: offload: {name} has no link to the host: give Device(host=Link(..))")
    pp = sizes.get("pp", 1)
    if "pp" in sizes and any(each.gpus % (machines.gpus // pp) for each in machines.groups):
        said = f"pp {pp} gives a pipeline rank {machines.gpus // pp} GPUs, which do not divide each group of {machines}"
        raise ScheduleError(f"like: {said}: take another pp, for a pipeline rank lies within one group")
    per_rank = fixed.stages_per_rank(values.get("schedule", "1F1B"), pp)
    if not per_rank and "pp" in sizes:
        raise ScheduleError(f"like: {values['stages']} stages on pp {pp}: take a multiple, and as many a rank")
    stages = values.get("stages", pp * min(per_rank, default=1))
    if stages > limits.stages and not values.get("word_parts"):
        raise ScheduleError(f"like: {stages} stages: the model admits up to {limits.stages}: take fewer, or fewer a rank")


def _check_rows(request: PlanRequest, shapes: Sequence[MeshShape], space: SearchSpace) -> None:
    values = space.fixed.values
    if not any(next(rows_of(request, shape, space), None) for shape in shapes):
        fixed = request.machines.gpus // prod(values.get(name, 1) for name in ("pp", "tp", "cp"))
        data = "/".join(map(str, sorted({shape.data_ranks for shape in shapes} or {fixed})))
        named = [f"{values[name]} {name}" for name in ("microbatches", "rows") if name in values]
        parts = f"like: a batch of {request.batch} rows does not divide by {' x '.join([f'{data} data ranks', *named])}"
        raise ScheduleError(f"{parts}: take a multiple, or other numbers")
    if values.get("keep") is not None and all(shape.shards == 1 for shape in shapes):
        raise ScheduleError("like: keep: nothing is sharded: give dp_shard or ep above 1, or keep all")


def _refused(request: PlanRequest, shapes: Sequence[MeshShape], space: SearchSpace) -> ScheduleError | None:
    """Why no schedule of the layout can run, by the schedule's own words; None if that is not the reason."""
    values = space.fixed.values
    for shape in shapes if "schedule" in values else ():
        name, (_, microbatches) = values["schedule"], next(rows_of(request, shape, space), (1, 1))
        for per_rank in islice(space.fixed.stages_per_rank(name, shape.pp), 1):
            try:
                space.fixed.choice(name, shape.pp, per_rank, values.get("group")).table(shape.pp, microbatches)
            except ScheduleError as error:
                return ScheduleError(f"like: {error}")
    name = next((name for name in _OF_HEADS if values.get(name)), None)
    said = None if name is None else f"like: {_OF_HEADS[name]}, and a head with a cross entropy after it: leave it out"
    return None if said is None else ScheduleError(said)
