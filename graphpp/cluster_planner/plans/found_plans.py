"""All plans of a search: in order, with reasons and the time-memory front; as text, JSON and HTML.

Contract: `TrainingPlans` is data; `to_json` and `from_json` are lossless. `ranked` makes it from predictions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from graphpp.arguments import shown
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction
from graphpp.cluster_planner.plans.settings import simplicity, unlike
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import GraphPPError, NoPlanError
from graphpp.from_json import document
from graphpp.report.comparison import PlanComparison
from graphpp.report.text_table import text_table
from graphpp.schedules.table.costs import Costs
from graphpp.units import spell_bytes, spell_time

_SHOWN = 12  # plans in a printed result
_CLOSE = 1.02  # slowdown against the fastest plan up to which a simpler one is preferred
_EQUAL = 1e-9  # relative difference of seconds that says nothing
_STATE = ("shards", "weights", "gradients", "optimizer", "buffers")
_LOST = {
    "forward": "forwards", "backward": "backwards", "recompute": "recomputation", "collectives": "collectives of tp, ep and cp",
    "bubble": "idle time", "gradients": "gathers and reductions", "optimizer": "the optimizer",
    "offload": "copies to and from the host",
}  # fmt: skip


@dataclass(frozen=True)
class TrainingPlans:
    """The plans: the best, the others that fit, the fastest first, then those over the cap, by excess bytes. `considered`:
    number of settings estimated or derived. `cap`: bytes that a device may hold, of unlike devices the most (None: any).
    `yours`: the layout of `like`, priced; `notes`: what is priced in another way than the layout has it. `asked`: what was
    given to the search, as text by name."""

    plans: tuple[TrainingPlan, ...]
    considered: int = 0
    cap: int | None = None
    yours: TrainingPlan | None = None
    notes: tuple[str, ...] = ()
    asked: Mapping[str, str] = field(default_factory=dict)

    @property
    def best(self) -> TrainingPlan:
        """The simplest plan of those that fit and take at most 2 % longer than the fastest one (`settings.simplicity`); of
        equally simple ones the fastest, and of equally fast ones that with the fewest bytes."""
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
        found: dict[str, Any] = {"asked": self.asked, "considered": self.considered, "cap": self.cap, "plans": entries}
        if self.yours is not None:
            compared = self._compared.document()
            found["yours"] = {"plan": json.loads(self.yours.to_json()), "notes": self.notes, "comparison": compared}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TrainingPlans:
        """Read plans, or one plan alone, from JSON text or a file. Raises `GraphPPError` for other text."""
        given = document(text, "plans")
        if "plans" not in given:
            return cls((TrainingPlan.from_json(json.dumps(given)),))
        if not isinstance(given["plans"], list) or not given["plans"]:
            raise GraphPPError("plans: take JSON of TrainingPlans.to_json, with one plan or more")
        plans = tuple(TrainingPlan.from_json(json.dumps(each)) for each in given["plans"])
        asked = given.get("asked", {})
        if not isinstance(asked, dict):
            raise GraphPPError(f"asked: take an object of names and texts, got {shown(asked)}")
        texts = {name: str(text) for name, text in asked.items()}
        found = cls(plans, given.get("considered", 0), given.get("cap"), asked=texts)
        yours = given.get("yours")
        if yours is None:
            return found
        if not isinstance(yours, dict) or "plan" not in yours:
            raise GraphPPError("yours: take JSON of TrainingPlans.to_json, with the plan of a layout")
        own, notes = TrainingPlan.from_json(json.dumps(yours["plan"])), tuple(map(str, yours.get("notes", ())))
        return replace(found, yours=own, notes=notes)

    def to_html(self) -> str:
        """All plans as a self-contained HTML page: what was asked, time against bytes, a table to sort and filter, two plans
        side by side. Write it with `encoding="utf-8"`."""
        from graphpp.cluster_planner.plans.plans_page import plans_page  # these two are imported on first use
        from graphpp.report.page_html import page_html

        page = plans_page(self.plans, self.yours, self.cap, self.considered, self.asked)
        return page_html(replace(page, notes=("Seconds and bytes are predictions: nothing has run.", *self.notes)))

    @property
    def _compared(self) -> PlanComparison:
        assert self.yours is not None
        return self.best.compare(self.yours)

    @property
    def _of_yours(self) -> str:
        """The layout beside the best plan, in one line."""
        assert self.yours is not None
        over = 0 if self.cap is None else self.yours.over(self.cap)
        cap = f"; {spell_bytes(int(over))} over the cap" if over > 0 else ""
        return f"{self.yours.setting}: {self._compared.line()}{cap}"

    def __str__(self) -> str:
        """A table of the first plans and of the best for each number of pipeline ranks; then the best plan in full."""
        best_of = dict[int, int]()
        for number, each in enumerate(self.plans, 1):
            best_of.setdefault(each.setting.shape.pp, number)
        shown = sorted({*range(1, min(_SHOWN, len(self.plans)) + 1), *best_of.values()})
        left = ("", "mesh", "stages, schedule", "microbatches", "keep", "recompute", "offload", "reason")
        heads = (*left[:-1], "step", "over bound", "MFU", "bubble", "bytes", "reason")
        table = text_table(heads, [_row(number, self.plans[number - 1]) for number in shown], left=left, wraps=left, width=180)
        more = len(self.plans) - len(shown)
        tail = [f"  and {more} more in .plans; {self.considered:,} settings were considered"] if more > 0 else []
        yours = [] if self.yours is None else [f"yours: {self._of_yours}", *(f"  {note}" for note in self.notes)]
        return "\n".join([table, *tail, *yours, str(self.best)])


def _row(number: int, plan: TrainingPlan) -> tuple[str, ...]:
    setting = plan.setting
    mesh = f"{setting.shape} on {plan.machines}" if plan.devices else str(setting.shape)
    return (
        f"{number}{'*' if plan.on_front else ''}", mesh, f"{setting.stages}, {setting.schedule}",
        f"{setting.microbatches} x {setting.rows}", "all" if setting.keep is None else str(setting.keep),
        setting.degree, "-" if setting.offload is None else f"{setting.offload:g}",
        spell_time(plan.step_seconds, "s"), plan.over_bound, plan.utilization, f"{plan.bubble:.1%}",
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
    ordered = sorted(found, key=lambda each: (max(0, each.over(cap)), *order(each)))
    fastest = ordered[0]
    if fastest.over(cap) > 0:
        raise _no_plan(fastest, facts(fastest), cap)
    close = (each for each in ordered if each.over(cap) <= 0 and rounded(each) <= _CLOSE * rounded(fastest))
    best, front = min(close, key=lambda each: simplicity(each.setting)), _front(ordered)
    reasons = {id(each): _reason(each, best, cap) for each in ordered} | {id(best): ""}
    if rounded(fastest) < rounded(best):
        slower = best.seconds.total / fastest.seconds.total - 1
        reasons[id(best)] = f"best: slower by {slower:.1%} than the fastest, but {unlike(best.setting, fastest.setting)}"
        reasons[id(fastest)] = f"the fastest, by {slower:.1%}, but {unlike(fastest.setting, best.setting)}"
    ordered.sort(key=lambda each: each is not best)
    plans = (plan_of(each, facts(each), reasons[id(each)], on_front=id(each) in front) for each in ordered)
    return TrainingPlans(tuple(plans), considered, int(cap) if cap < float("inf") else None)


def _no_plan(closest: Prediction, facts: Mapping[str, Any], cap: float) -> NoPlanError:
    """The error that says how many bytes the closest prediction lacks, and how many are state, equal for every batch."""
    memory, taken, cap = closest.memory, closest.peaks[closest.fullest], closest.caps[closest.fullest] if closest.caps else cap
    devices = facts.get("devices")
    on, device = (f" on {facts['machines']}", f", {devices[closest.fullest]}") if devices else ("", "")
    state = min(taken, sum(memory.get(kind, 0) for kind in _STATE))  # the most of each kind may come at different times
    kinds = ", ".join(f"{kind} {spell_bytes(nbytes)}" for kind, nbytes in memory.items() if nbytes)
    smaller = "" if state > cap else "a smaller batch, "
    return NoPlanError(
        f"memory_cap={cap:,} bytes: no plan fits; the closest, {closest.setting}{on}, takes {spell_bytes(taken)} on its "
        f"fullest rank{device}, {spell_bytes(taken - int(cap))} too much: {spell_bytes(state)} of it are state"
        f"{', which alone is over the cap' if state > cap else ''} ({kinds}): take more GPUs, {smaller}or GPUs with more memory"
    )


def plan_of(found: Prediction, facts: dict[str, Any], reason: str = "", *, on_front: bool = False) -> TrainingPlan:
    costs: Costs = facts["costs"]
    stages = tuple(replace(each, peak_bytes={}, received_bytes={}, sent_bytes={}) for each in costs.stages)
    return TrainingPlan(
        setting=found.setting, seconds=found.seconds, peaks=found.peaks, memory=found.memory, sent=found.sent, reason=reason,
        host=found.host, caps=found.caps, moved=found.moved, on_front=on_front,
        **{**facts, "costs": replace(costs, stages=stages)},
    )  # fmt: skip


def with_yours(plans: TrainingPlans | None, yours: TrainingPlan, notes: tuple[str, ...], cap: int) -> TrainingPlans:
    """The plans with a layout's own; `plans=None`: the layout alone."""
    if plans is None:
        over = f"{spell_bytes(int(yours.over(cap)))} over the cap" if yours.over(cap) > 0 else ""
        return TrainingPlans((replace(yours, reason=over),), 1, cap, replace(yours, reason=over), notes)
    faster = 1 - yours.step_seconds / min(each.step_seconds for each in plans if each.over(cap) <= 0)
    reason = f"faster by {faster:.1%} than what the search found" if faster > _EQUAL else _reason(yours, plans.best, cap)
    return replace(plans, yours=replace(yours, reason=reason), notes=notes)


def _front(found: Sequence[Prediction]) -> set[int]:
    front, least = set[int](), None
    for each in sorted(found, key=lambda each: (rounded(each), each.peak)):
        if least is None or each.peak < least:
            least = each.peak
            front.add(id(each))
    return front


def _reason(each: Prediction | TrainingPlan, best: Prediction | TrainingPlan, cap: float) -> str:
    """Why `each` is not the best: its excess bytes, what makes it less simple, or where its step loses most."""
    if each.over(cap) > 0:
        kind = max(each.memory, key=lambda name: each.memory[name] - best.memory.get(name, 0))
        return f"{spell_bytes(int(each.over(cap)))} over the cap, most of it {kind}"
    slower, faster = each.seconds.total / best.seconds.total - 1, best.seconds.total / each.seconds.total - 1
    less_simple = simplicity(each.setting) > simplicity(best.setting)
    but = f", but {unlike(each.setting, best.setting)}" if less_simple else ""
    if faster > _EQUAL:
        return f"faster by {faster:.1%}{but}"
    if slower <= _EQUAL:
        more = each.peak - best.peak
        return f"as fast, with {spell_bytes(more)} more" if more > 0 else f"as fast{but}"
    lost = {item.name: getattr(each.seconds, item.name) - getattr(best.seconds, item.name) for item in fields(each.seconds)}
    name = max(lost, key=lambda each: lost[each])
    return f"slower by {slower:.1%}: {spell_time(lost[name], 's')} more {_LOST[name]}"
