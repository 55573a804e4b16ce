"""Turn a `TrainingPlan` into options of `graphpp.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphpp.arguments import type_name
from graphpp.batch.microbatch import FlatMicrobatch, Microbatch
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import GraphPPError
from graphpp.options.gradients import read_gradients
from graphpp.options.memory import read_memory
from graphpp.options.microbatches import read_microbatches
from graphpp.options.offload import Offload
from graphpp.options.option import Group
from graphpp.options.parallel import read_parallel
from graphpp.options.recompute import Recompute
from graphpp.schedules.generate.megatron_interleaved import megatron_interleaved
from graphpp.schedules.generate.read import ScheduleLike

DECIDED = ("split", "schedule", "microbatches", "parallel", "memory", "gradients")
"""The options that a plan decides in full or in part, in the order of `graphpp.compile`."""

_OPEN = {"split": None, "schedule": "auto"}  # values that leave an option undecided
_READERS: Mapping[str, Callable[[Any], Group]] = {
    "microbatches": read_microbatches, "parallel": read_parallel, "memory": read_memory, "gradients": read_gradients
}  # fmt: skip


def with_plan(plan: object, options: tuple[Any, ...], example: object = None, *, sharded: bool = True) -> tuple[Any, ...]:
    """The options named in `DECIDED` with those that the plan decides; `plan=None`: as given. `example`: the microbatch given
    to `graphpp.compile`. `sharded=False`: without options about shards. Raises `GraphPPError` if an option that the plan
    decides was also given, or if an example's rows differ from the plan's microbatches."""
    if plan is None:
        return options
    given = dict(zip(DECIDED, options, strict=True))
    if not isinstance(plan, TrainingPlan):
        raise GraphPPError(f"plan: take a graphpp.TrainingPlan, e.g. graphpp.plan(...).best, got {type_name(plan)}")
    kept = ("split",) if plan.measured else ()
    for name, form in _OPEN.items():
        if name not in kept and not (given[name] is form or (isinstance(given[name], str) and given[name] == form)):
            raise GraphPPError(f"{name}: plan= decides it: leave one of the two out")
    setting = plan.setting
    groups = {name: read(given[name]) for name, read in _READERS.items()}
    if not read_microbatches(given["microbatches"]).batch_dims:
        _check_rows(setting, example)
    decided = _decided(plan) | {"microbatches": {"count": setting.microbatches}} | ({} if sharded else {"parallel": {}})
    split = given["split"] if plan.measured else list(plan.split) or None if setting.stages > 1 else 1
    return split, _schedule(setting), *(_merged(group, decided[name]) for name, group in groups.items())


def _check_rows(setting: PlanSetting, example: object) -> None:
    """Raise if an example's rows differ from the plan's microbatches: it would be captured and then never run."""
    tensors = FlatMicrobatch.of(example).tensors.values() if isinstance(example, Microbatch) else ()
    sizes = {len(each) for each in tensors if each.dim()}
    if sizes and setting.rows not in sizes:
        rows = ", ".join(map(str, sorted(sizes)))
        said = f"its tensors have {rows} rows, and plan= has microbatches of {setting.rows}"
        raise GraphPPError(f"example: {said}: give an example of as many rows, or leave it out")


def _decided(plan: TrainingPlan) -> dict[str, dict[str, Any]]:
    if plan.measured:
        return {"parallel": {"keep": plan.setting.keep}, "memory": {}, "gradients": {}}
    dtype = None if plan.dtype is None else getattr(torch, plan.dtype)
    offload = None if plan.setting.offload is None else Offload(plan.setting.offload)
    parts = plan.setting.shape.pp if plan.setting.word_parts else None
    return {
        "parallel": {"keep": plan.setting.keep, "param_dtype": dtype},
        "memory": {
            "recompute": _recompute(plan), "offload": offload, "word_parts": parts, "logits_tokens": plan.setting.logits_tokens
        },
        "gradients": {"dtype": None if dtype is None else torch.float32},
    }


def _recompute(plan: TrainingPlan) -> Any:
    if plan.setting.recomputed is None:
        return plan.setting.recompute
    return Recompute(plan.recomputed, nodes="selective" if plan.setting.recompute == "selective" else None)


def _schedule(setting: PlanSetting) -> ScheduleLike:
    if setting.schedule.order is not None:
        return setting.schedule.table(setting.shape.pp, setting.microbatches)
    group = setting.schedule.group
    return setting.schedule.name if group is None else partial(megatron_interleaved, group=group)


def _merged(group: Group, decided: Mapping[str, Any]) -> Group:
    usual = type(group)()
    for name in decided:
        if getattr(group, name) != getattr(usual, name):
            raise GraphPPError(f"{group.prefix}.{name}: plan= decides it: leave one of the two out")
    return replace(group, **{name: value for name, value in decided.items() if value is not None})
