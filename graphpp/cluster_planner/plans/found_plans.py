"""All plans that a search has found: in order, with the front of time and memory, as text, as JSON and as a page.

Contract: `TrainingPlans` is data; `to_json` and `from_json` lose nothing.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from graphpp.cluster_planner.plans.from_json import document
from graphpp.cluster_planner.plans.page import plans_html
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.errors import GraphPPError
from graphpp.units import spell_bytes, spell_time

_SHOWN = 12  # plans in a printed result


@dataclass(frozen=True)
class TrainingPlans:
    """The plans found, the fastest that fits first, then those over the cap by the bytes that they lack.

    `considered`: how many settings were ordered by estimates, or refined from those. `cap`: the bytes that a GPU may hold
    (None: any).
    """

    plans: tuple[TrainingPlan, ...]
    considered: int = 0
    cap: int | None = None

    @property
    def best(self) -> TrainingPlan:
        """The fastest plan that fits; of equally fast ones that with the fewest bytes."""
        return self.plans[0]

    @property
    def front(self) -> tuple[TrainingPlan, ...]:
        """The plans of which none is beaten in both time and memory, the fastest first."""
        return tuple(sorted((each for each in self.plans if each.on_front), key=lambda each: each.step_seconds))

    def where(self, accepts: Callable[[TrainingPlan], bool]) -> TrainingPlans:
        """The plans that `accepts` takes, with their reasons."""
        return replace(self, plans=tuple(filter(accepts, self.plans)))

    def _shown(self) -> list[int]:
        """The numbers of the plans to print, from 1: the first ones, and the best with each other number of pipeline ranks."""
        best = dict[int, int]()
        for number, each in enumerate(self.plans, 1):
            best.setdefault(each.setting.shape.pp, number)
        return sorted({*range(1, min(_SHOWN, len(self.plans)) + 1), *best.values()})

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
        """The plans of a JSON text, or of a file of it; of one plan alone too. Raises `GraphPPError` for another text."""
        given = document(text, "plans")
        if "plans" not in given:
            return cls((TrainingPlan.from_json(json.dumps(given)),))
        if not isinstance(given["plans"], list) or not given["plans"]:
            raise GraphPPError("plans: take JSON of TrainingPlans.to_json, with one plan or more")
        plans = tuple(TrainingPlan.from_json(json.dumps(each)) for each in given["plans"])
        return cls(plans, given.get("considered", 0), given.get("cap"))

    def to_html(self) -> str:
        """All plans as an HTML page of its own, time against bytes. Write it to a file with `encoding="utf-8"`."""
        return plans_html(self.plans, self.considered, self.cap)

    def __str__(self) -> str:
        """A table: a line for each of the first plans, and for the best with each other number of pipeline ranks; then the
        best one in full."""
        from rich import box  # loaded by the first result that is printed
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE)
        for column in ("", "mesh", "stages, schedule", "microbatches", "keep", "recompute", "offload"):
            table.add_column(column)
        for column in ("step", "MFU", "bubble", "bytes"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("reason")
        shown = self._shown()
        for number in shown:
            table.add_row(*_row(number, self.plans[number - 1]))
        out = io.StringIO()
        Console(file=out, width=180, no_color=True).print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
        more = len(self.plans) - len(shown)
        tail = [f"  and {more} more in .plans; {self.considered:,} settings were considered"] if more > 0 else []
        return "\n".join([*lines, *tail, str(self.best)] if self.plans else ["no plan"])


def _row(number: int, plan: TrainingPlan) -> tuple[str, ...]:
    setting = plan.setting
    return (
        f"{number}{'*' if plan.on_front else ''}", str(setting.shape), f"{setting.stages}, {setting.schedule}",
        f"{setting.microbatches} x {setting.rows}", "all" if setting.keep is None else str(setting.keep),
        setting.degree, "-" if setting.offload is None else f"{setting.offload:g}",
        spell_time(plan.step_seconds, "s"), f"{plan.mfu:.1%}", f"{plan.bubble:.1%}",
        spell_bytes(plan.peak), plan.reason or "best",
    )  # fmt: skip
