"""Read a layout from any of its forms: graphpp's words, arguments of Megatron-LM, files of torchtitan and DeepSpeed, plans."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from graphpp.arguments import one_of, require
from graphpp.cluster_planner.plans.found_plans import TrainingPlans
from graphpp.cluster_planner.plans.layouts.deepspeed import read_deepspeed
from graphpp.cluster_planner.plans.layouts.layout import Context, Layout
from graphpp.cluster_planner.plans.layouts.megatron import read_megatron
from graphpp.cluster_planner.plans.layouts.own_words import read_own_words
from graphpp.cluster_planner.plans.layouts.torchtitan import read_torchtitan
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import ScheduleError
from graphpp.from_json import document

LikeForm = str | Path | Mapping[str, object] | TrainingPlan | PlanSetting
LIKE = one_of(str, Path, Mapping, TrainingPlan, PlanSetting, takes=(
    "a layout in words, Megatron-LM's arguments, a file of torchtitan, DeepSpeed or a plan, choices by name, or a plan"
))  # fmt: skip


def read_like(like: LikeForm, context: Context) -> Layout:
    """The layout. A text that names a file is read from there. Raises `ScheduleError`, `GraphPPError` for other forms."""
    require(ScheduleError, "like", LIKE, like)
    if isinstance(like, TrainingPlan):
        return _of_plan(like)
    if isinstance(like, PlanSetting):
        return Layout(_of_setting(like))
    if isinstance(like, Mapping):
        return Layout(dict(like))
    return _of_text(_text(like), context)


def _of_text(text: str, context: Context) -> Layout:
    if text.lstrip().startswith("{"):
        given = document(text, "like")
        of_plan = {"plans", "setting"} & given.keys()
        return _of_plan(TrainingPlans.from_json(text).best) if of_plan else read_deepspeed(given, context)
    if re.search(r"(^|\s)--[a-z]", text):
        return read_megatron(text, context)
    if re.search(r"^\s*\[[\w.]+\]\s*$", text, re.MULTILINE):
        return read_torchtitan(text, context)
    return read_own_words(text)


def _text(like: str | Path) -> str:
    """The text itself, or that of a file."""
    named = isinstance(like, Path) or re.search(r"\.(json|toml|sh|txt|args)$", like.strip())
    if not named:
        return str(like)
    try:
        return Path(str(like).strip()).read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:
        said = getattr(fault, "strerror", None) or fault
        raise ScheduleError(f"like: {like}: {said}: name a file that can be read") from fault


def _of_plan(plan: TrainingPlan) -> Layout:
    if plan.measured:
        raise ScheduleError("like: a plan of measured costs has no mesh for machines: take a plan of a model")
    split = {} if plan.setting.word_parts or not plan.split else {"split": plan.split}
    return Layout({**_of_setting(plan.setting), **split}, (), plan.batch, plan.tokens or None, plan.dtype)


def _of_setting(setting: PlanSetting) -> dict[str, object]:
    schedule, found = setting.schedule, asdict(setting)
    order = {} if schedule.order is None else {"order": schedule.order}
    recomputed = {} if setting.recomputed is None else {"recomputed": setting.recomputed}
    plain = {name: found[name] for name in found if name not in ("shape", "schedule", "recomputed")}
    return {
        **setting.shape.sizes(), **plain, **recomputed, **order, "schedule": schedule.name, "group": schedule.group,
        "stages_per_rank": schedule.stages_per_rank,
    }  # fmt: skip
