"""All plans of a search: in order, with reasons and the time-memory front; as text, JSON and HTML.

Contract: `TrainingPlans` is data; `to_json` and `from_json` are lossless. `ranked` makes it from predictions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from graphpp.cluster_planner.plans.predict_step import Prediction
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import GraphPPError, NoPlanError
from graphpp.from_json import document
from graphpp.report.page import Page, PlanEntry
from graphpp.report.text_table import text_table
from graphpp.units import spell_bytes, spell_time

_SHOWN = 12  # plans in a printed result
_LOST = {
    "forward": "forwards", "backward": "backwards", "recompute": "recomputation", "collectives": "collectives of tp, ep and cp",
    "bubble": "idle time", "gradients": "gathers and reductions", "optimizer": "the optimizer",
    "offload": "copies to and from the host",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingPlans:
    """The plans: those that fit, the fastest first, then those over the cap, by excess bytes. `considered`: number of settings
    estimated or derived. `cap`: bytes that a device may hold (None: any)."""

    plans: tuple[TrainingPlan, ...]
    considered: int = 0
    cap: int | None = None

    @property
    def best(self) -> TrainingPlan:
        """The fastest plan that fits; among equally fast ones, the one with the fewest bytes."""
        return self.plans[0]

    @property
    def front(self) -> tuple[TrainingPlan, ...]:
        """The plans that no other plan beats in both time and memory, the fastest first."""
        return tuple(sorted((each for each in self.plans if each.on_front), key=lambda each: each.step_seconds))

    def where(self, accepts: Callable[[TrainingPlan], bool]) -> TrainingPlans:
        """The plans that `accepts` returns True for, with their reasons. Raises `NoPlanError` if there is none."""
        plans = tuple(filter(accepts, self.plans))
        if not plans:
            raise NoPlanError(f"where: it accepts none of {len(self)} plans; the best is {self.best.setting}: accept others")
        return replace(self, plans=plans)

    def __iter__(self) -> Iterator[TrainingPlan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def to_json(self) -> str:
        """All plans as JSON text."""
        entries = [json.loads(each.to_json()) for each in self.plans]
        return json.dumps({"considered": self.considered, "cap": self.cap, "plans": entries}, indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TrainingPlans:
        """Read plans, or one plan alone, from JSON text or a file. Raises `GraphPPError` for other text."""
        given = document(text, "plans")
        if "plans" not in given:
            return cls((TrainingPlan.from_json(json.dumps(given)),))
        if not isinstance(given["plans"], list) or not given["plans"]:
            raise GraphPPError("plans: take JSON of TrainingPlans.to_json, with one plan or more")
        plans = tuple(TrainingPlan.from_json(json.dumps(each)) for each in given["plans"])
        return cls(plans, given.get("considered", 0), given.get("cap"))

    def to_html(self) -> str:
        """All plans as a self-contained HTML page, time against bytes. Write it with `encoding="utf-8"`."""
        from graphpp.report.page_html import page_html  # imported on first use

        best = self.best
        facts = (
            ("machines", best.machines), ("best", str(best.setting)), ("step", spell_time(best.step_seconds, "s")),
            ("rate", best.rate), ("MFU", best.utilization),
            ("most bytes", spell_bytes(best.peak)), ("settings considered", f"{self.considered:,}"),
        )  # fmt: skip
        notes = ("Seconds and bytes are predictions: nothing has run.",)
        return page_html(Page("Plans", facts, notes, plans=tuple(map(self._entry, self.plans)), cap=self.cap))

    def _entry(self, plan: TrainingPlan) -> PlanEntry:
        details = (*plan.details.items(), ("MFU", plan.utilization))
        fits = self.cap is None or plan.peak <= self.cap
        return PlanEntry(str(plan.setting), plan.step_seconds, plan.peak, plan.reason, fits, plan.on_front, details)

    def __str__(self) -> str:
        """A table of the first plans and of the best for each number of pipeline ranks; then the best plan in full."""
        best_of = dict[int, int]()
        for number, each in enumerate(self.plans, 1):
            best_of.setdefault(each.setting.shape.pp, number)
        shown = sorted({*range(1, min(_SHOWN, len(self.plans)) + 1), *best_of.values()})
        left = ("", "mesh", "stages, schedule", "microbatches", "keep", "recompute", "offload", "reason")
        heads = (*left[:-1], "step", "MFU", "bubble", "bytes", "reason")
        table = text_table(heads, [_row(number, self.plans[number - 1]) for number in shown], left=left, wraps=left, width=180)
        more = len(self.plans) - len(shown)
        tail = [f"  and {more} more in .plans; {self.considered:,} settings were considered"] if more > 0 else []
        return "\n".join([table, *tail, str(self.best)])


def _row(number: int, plan: TrainingPlan) -> tuple[str, ...]:
    setting = plan.setting
    return (
        f"{number}{'*' if plan.on_front else ''}", str(setting.shape), f"{setting.stages}, {setting.schedule}",
        f"{setting.microbatches} x {setting.rows}", "all" if setting.keep is None else str(setting.keep),
        setting.degree, "-" if setting.offload is None else f"{setting.offload:g}",
        spell_time(plan.step_seconds, "s"), plan.utilization, f"{plan.bubble:.1%}",
        spell_bytes(plan.peak), plan.reason or "best",
    )  # fmt: skip


# ---------------------------------------------------------------------------------- the order of the plans


def rounded(found: Prediction) -> float:
    """Seconds of a step for comparisons, rounded because simulated times differ in the last digits."""
    return float(f"{found.seconds.total:.9g}")


def order(found: Prediction) -> tuple[float, int, str]:
    """A sort key: the fastest first, then the fewest bytes."""
    return rounded(found), found.peak, repr(found.setting)


def ranked(
    found: Sequence[Prediction], cap: float, considered: int, facts: Callable[[Prediction], dict[str, Any]]
) -> TrainingPlans:
    """The plans of predictions, in order. `facts`: the `TrainingPlan` fields that a prediction lacks. Raises `NoPlanError`."""
    ordered = sorted(found, key=lambda each: (max(0, each.peak - cap), *order(each)))
    best = ordered[0]
    if best.peak > cap:
        raise NoPlanError(
            f"memory_cap={cap:,} bytes: no plan fits; the closest, {best.setting}, takes {spell_bytes(best.peak)} on its "
            "fullest rank: take more GPUs, a smaller batch, or GPUs with more memory"
        )
    front = _front(ordered)
    plans = (
        TrainingPlan(
            setting=each.setting, seconds=each.seconds, peaks=each.peaks, memory=each.memory, sent=each.sent,
            reason="" if each is best else _reason(each, best, cap), on_front=id(each) in front, **facts(each),
        )
        for each in ordered
    )  # fmt: skip
    return TrainingPlans(tuple(plans), considered, int(cap) if cap < float("inf") else None)


def _front(found: Sequence[Prediction]) -> set[int]:
    front, least = set[int](), None
    for each in sorted(found, key=lambda each: (rounded(each), each.peak)):
        if least is None or each.peak < least:
            least = each.peak
            front.add(id(each))
    return front


def _reason(each: Prediction, best: Prediction, cap: float) -> str:
    """Why `each` is not the best: its excess bytes, or the part of the step in which it loses most."""
    if each.peak > cap:
        kind = max(each.memory, key=lambda name: each.memory[name] - best.memory.get(name, 0))
        return f"{spell_bytes(each.peak - int(cap))} over the cap, most of it {kind}"
    slower = each.seconds.total / best.seconds.total - 1
    if slower <= 1e-9:
        more = each.peak - best.peak
        return f"as fast, with {spell_bytes(more)} more" if more > 0 else "as fast"
    lost = {item.name: getattr(each.seconds, item.name) - getattr(best.seconds, item.name) for item in fields(each.seconds)}
    name = max(lost, key=lambda each: lost[each])
    return f"slower by {slower:.1%}: {spell_time(lost[name], 's')} more {_LOST[name]}"
