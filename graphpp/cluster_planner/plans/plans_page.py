"""The report page of a search: what was asked, and each plan with its columns, its parts and its step.

Contract: `plans_page` returns the data of the page. The layout of `like` comes last and is marked. The steps of that layout, of
the front and then of the other plans in order are simulated, until the page has `_MOST_BOXES` computations of them. Equal plans
give equal pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.report.page import Cell, Page, PlanEntry
from graphpp.report.timeline_view import TimelineView
from graphpp.units import spell_bytes, spell_time

_MOST_BOXES = 40_000  # computations of all steps on a page, some 300 KB and two seconds

_LEFT_OUT = "Without the optimizer, copies to the host, contention, and sums over copies that nothing hides."


def plans_page(
    plans: Sequence[TrainingPlan], yours: TrainingPlan | None, cap: int | None, considered: int, asked: Mapping[str, str]
) -> Page:
    """`plans`: the best first; `yours`: the layout of `like`; `asked`: what was given to the search, as text by name."""
    best = plans[0]
    given = {
        "model": "",
        "machines": best.machines,
        "batch": f"{best.batch} rows" + (f" of {best.tokens:,} tokens" if best.tokens else ""),
        "dtype": best.dtype or "the model's own",
        "float8": best.float8 or "",
        "memory cap": "" if cap is None else spell_bytes(cap),
        **asked,
    }
    facts = {
        "best": str(best.setting),
        "step": spell_time(best.step_seconds, "s"),
        "rate": best.rate,
        "MFU": best.utilization,
        "most bytes": spell_bytes(best.peak),
        "settings considered": f"{considered:,}",
        "yours": "" if yours is None else f"{yours.setting}: {spell_time(yours.step_seconds, 's')}, {yours.reason}",
    }
    given_pairs, found_pairs = (tuple((name, text) for name, text in each.items() if text) for each in (given, facts))
    title = "Plans of a measured pipeline" if best.measured else f"Plans of {given['model'] or 'a model'} on {best.machines}"
    line = cap if len({*best.caps}) < 2 else None  # unlike devices have no common one
    return Page(title, given_pairs, found_pairs, plans=tuple(_entries(plans, yours, cap)), cap=line)


def _entries(plans: Sequence[TrainingPlan], yours: TrainingPlan | None, cap: int | None) -> Iterator[PlanEntry]:
    every = [*plans, *([] if yours is None else [yours])]
    first = {at for at, plan in enumerate(every) if plan.on_front or at == len(plans)}
    steps = _steps(every, sorted(range(len(every)), key=lambda at: (at not in first, at)))
    for at, plan in enumerate(every):
        compared = plans[0].compare(plan)
        yield PlanEntry(
            f"{'yours: ' if at == len(plans) else ''}{plan.setting}",
            plan.step_seconds,
            plan.peak,
            plan.reason,
            fits=cap is None or plan.over(cap) <= 0,
            on_front=plan.on_front,
            yours=at == len(plans),
            choices=tuple(_choices(plan.setting)),
            results=tuple(_results(plan)),
            texts=compared.choices[1],
            numbers=tuple((*key, number) for key, number in compared.numbers[1].items()),
            timeline=steps.get(at),
        )


def _choices(setting: PlanSetting) -> Iterator[Cell]:
    head = "words cut" if setting.word_parts else f"pieces of {setting.logits_tokens}" if setting.logits_tokens else "whole"
    layers = 0 if setting.recompute is None else sum(setting.recomputed or ())
    all_kept = setting.schedule.stages_per_rank + 1  # orders "all" after each number of kept stages
    values: dict[str, float | str] = {
        **setting.shape.sizes(), "stages": setting.stages, "schedule": str(setting.schedule),
        "microbatches": setting.microbatches, "rows": setting.rows, "keep": all_kept if setting.keep is None else setting.keep,
        "recompute": str(setting.recompute or "-"), "layers": layers, "offload": setting.offload or 0, "head": head,
    }  # fmt: skip
    shape, texts = setting.shape, {"keep": "all" if setting.keep is None else str(setting.keep), "layers": str(layers or "-")}
    texts["offload"] = "-" if setting.offload is None else f"{setting.offload:g}"
    if shape.folded:
        values["ep"], texts["ep"] = shape.expert_ranks, f"{shape.ep} x {shape.cp * shape.tp}"
    return (Cell(name, value, texts.get(name, str(value))) for name, value in values.items())


def _results(plan: TrainingPlan) -> Iterator[Cell]:
    yield Cell("step", plan.step_seconds, spell_time(plan.step_seconds, "s"))
    yield Cell("bound", plan.bound, spell_time(plan.bound, "s") if plan.bound else "-")
    yield Cell("MFU", plan.mfu, plan.utilization)
    yield Cell("memory", plan.peak, spell_bytes(plan.peak))


def _steps(plans: Sequence[TrainingPlan], turns: Sequence[int]) -> dict[int, TimelineView]:
    """The steps that have room on the page, by the index of their plan."""
    found, left = dict[int, TimelineView](), _MOST_BOXES
    for at in turns:
        if left > 0 and plans[at].costs is not None:
            found[at] = _step(plans[at])
            left -= len(found[at].boxes)
    return found


def _step(plan: TrainingPlan) -> TimelineView:
    step = plan.timeline()
    drawn, every = step.schedule.microbatches, plan.setting.microbatches
    few = f"The first {drawn} of {every} microbatches; further ones repeat the middle of the step. " if drawn < every else ""
    return TimelineView.of(step, few + _LEFT_OUT, drawn == every)
