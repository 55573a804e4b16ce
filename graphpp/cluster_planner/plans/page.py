"""Found plans as an HTML page: time against bytes, with the front of both, and each plan in full.

Contract: `plans_html(..)` is a file of its own that needs no network (`graphpp/report/`).
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.report.page import Page, PlanEntry
from graphpp.units import spell_bytes, spell_time


def plans_html(plans: Sequence[TrainingPlan], considered: int, cap: int | None) -> str:
    """The text of the page of plans, the best first. `considered`, `cap`: as in `TrainingPlans`."""
    from graphpp.report.page_html import page_html  # the template: loaded by the first page

    best = plans[0]
    facts = (
        ("machines", best.machines), ("best", str(best.setting)), ("step", spell_time(best.step_seconds, "s")),
        ("rate", best.rate), ("MFU", f"{best.mfu:.1%}"),
        ("most bytes", spell_bytes(best.peak)), ("settings considered", f"{considered:,}"),
    )  # fmt: skip
    notes = ("Seconds and bytes are predictions: nothing has run.",)
    return page_html(Page("Plans", facts, notes, plans=_entries(plans, cap), cap=cap))


def _entries(plans: Sequence[TrainingPlan], cap: int | None) -> tuple[PlanEntry, ...]:
    return tuple(_entry(each, cap is None or each.peak <= cap) for each in plans)


def _entry(plan: TrainingPlan, fits: bool) -> PlanEntry:
    details = (*plan.details.items(), ("MFU", f"{plan.mfu:.1%}"))
    return PlanEntry(str(plan.setting), plan.step_seconds, plan.peak, plan.reason, fits, details)
