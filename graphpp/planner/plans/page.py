"""Found plans as an HTML page: time against bytes, with the front of both, and each plan in full.

Contract: `plans_html(..)` is a file of its own that needs no network (`graphpp/report/`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from graphpp.planner.plans.training_plan import TrainingPlan
from graphpp.report.page import Page, PlanEntry
from graphpp.units import spell_bytes, spell_time


def plans_html(plans: Sequence[TrainingPlan], considered: int, cap: int | None) -> str:
    """The text of the page of plans, the best first. `considered`, `cap`: as in `TrainingPlans`."""
    from graphpp.report.page_html import page_html  # the template: loaded by the first page

    best = plans[0]
    facts = (
        ("machines", best.machines), ("best", str(best.setting)), ("step", spell_time(best.step_seconds, "s")),
        ("tokens per second", f"{best.tokens_per_second:,.0f}"), ("MFU", f"{best.mfu:.1%}"),
        ("most bytes", spell_bytes(best.peak)), ("settings considered", f"{considered:,}"),
    )  # fmt: skip
    notes = ("Seconds and bytes are predictions: nothing has run.",)
    return page_html(Page("Plans", facts, notes, plans=_entries(plans, cap), cap=cap))


def _entries(plans: Sequence[TrainingPlan], cap: int | None) -> tuple[PlanEntry, ...]:
    return tuple(
        PlanEntry(str(each.setting), each.step_seconds, each.peak, each.reason, cap is None or each.peak <= cap, _details(each))
        for each in plans
    )


def _details(plan: TrainingPlan) -> tuple[tuple[str, str], ...]:
    seconds = [(item.name, getattr(plan.seconds, item.name)) for item in fields(plan.seconds)]
    shares = ", ".join(f"{name} {each / plan.step_seconds:.1%}" for name, each in seconds if each > 0)
    held = ", ".join(f"{kind} {spell_bytes(each)}" for kind, each in plan.memory.items() if each)
    sent = ", ".join(f"{name} {spell_bytes(each)}" for name, each in plan.sent.items() if each)
    return (
        ("seconds", shares), ("MFU", f"{plan.mfu:.1%}"), ("bytes of the fullest rank, the most of each kind", held),
        ("sent by a rank in a step", sent or "nothing"), ("stages start at", ", ".join(plan.split) or "the first operation"),
    )  # fmt: skip
