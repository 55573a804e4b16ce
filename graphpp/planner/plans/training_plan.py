"""The plans that a search has found, as data: what each of them takes, and why it is not the best.

Contract
    A `TrainingPlan` holds numbers and text alone. `to_json` and `from_json` lose nothing; equal plans are equal.
    `graphpp.compile(model, loss, plan=plan)` trains by it. Seconds and bytes are predictions for `machines`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from graphpp.errors import GraphPPError, ScheduleError
from graphpp.planner.plans.mesh_shapes import MeshShape
from graphpp.planner.plans.settings import ScheduleChoice, Setting
from graphpp.report.page import Page, PlanEntry
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes, spell_time

_SHOWN = 12  # plans in a printed result
_FORMAT = 1  # of the JSON text


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step, added up on the rank that computes most.

    `forward`, `backward`: computation; `recompute`: forwards that are repeated; `collectives`: of `tp`, `ep` and `cp` within the
    computation; `bubble`: the rank waits for others or for messages; `gradients`: reductions and gathers along data ranks that
    no computation hides; `optimizer`: its step.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    collectives: float = 0.0
    bubble: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True)
class TrainingPlan:
    """One way to train a model on `machines`, with its predicted cost.

    `setting`: the mesh, the microbatches, the schedule, `keep` and `recompute`. `split`: the FQNs at which the stages start.
    `seconds`: of a step; `batch`: rows of a step on all ranks; `tokens`: of a row. `mfu`: FLOPs of the model, without repeated
    ones, by the peak of all GPUs. `dtype`: in which the model computes (None: its own). `peaks`: by pipeline rank, the most bytes
    at one time; `memory`: of the fullest rank, the most bytes of each kind. `sent`: the bytes that a rank sends along each
    dimension in a step, of the rank with the most. `reason`: why the plan is not the best; "" for the best. `on_front`: no other
    plan has both less time and less memory.
    """

    machines: str
    setting: Setting
    split: tuple[str, ...]
    batch: int
    tokens: int
    seconds: StepSeconds
    mfu: float
    dtype: str | None
    peaks: tuple[int, ...]
    memory: Mapping[str, int] = field(hash=False)
    sent: Mapping[str, int] = field(hash=False)
    reason: str = ""
    on_front: bool = False

    @property
    def mesh(self) -> dict[str, int]:
        """The dimensions of the mesh and their sizes, outermost first, as `init_device_mesh` takes them."""
        return self.setting.shape.needed(sharded=self.dtype is not None)

    @property
    def step_seconds(self) -> float:
        """The seconds of a step."""
        return self.seconds.total

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.batch * self.tokens / self.step_seconds

    @property
    def bubble(self) -> float:
        """The share of a step in which the rank that computes most waits for others."""
        return self.seconds.bubble / self.step_seconds

    @property
    def peak(self) -> int:
        """The most bytes at one time on any rank."""
        return max(self.peaks)

    def entry(self, cap: int | None = None) -> PlanEntry:
        """The plan as data of a report page; `cap`: the bytes that a rank may hold."""
        held = ", ".join(f"{name} {spell_bytes(each)}" for name, each in self.memory.items() if each)
        details = (
            ("stages, schedule", f"{self.setting.stages}, {self.setting.schedule}"),
            ("MFU", f"{self.mfu:.1%}"),
            ("idle", f"{self.bubble:.1%}"),
            ("memory", held),
        )
        fits = cap is None or self.peak <= cap
        return PlanEntry(str(self.setting), self.step_seconds, self.peak, self.reason, fits, details)

    def table(self) -> Schedule:
        """The schedule of a pipeline."""
        return self.setting.schedule.table(self.setting.shape.pp, self.setting.microbatches)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TrainingPlan:
        """The plan of a JSON text, or of a file of it. Raises `GraphPPError` for another text, naming the entry."""
        given = _document(text)
        if given.get("format") != _FORMAT:
            raise GraphPPError(f"plan: take JSON of TrainingPlan.to_json with format {_FORMAT}, got {given.get('format')!r}")
        found = _read(cls, {name: each for name, each in given.items() if name != "format"}, "plan")
        assert isinstance(found, TrainingPlan)
        return found

    def __str__(self) -> str:
        """Some lines: the setting, the time by its parts, the memory by kind."""
        parts = {item.name: getattr(self.seconds, item.name) for item in fields(self.seconds)}
        shares = ", ".join(f"{name} {each / self.step_seconds:.1%}" for name, each in parts.items() if each > 0)
        held = ", ".join(f"{name} {spell_bytes(each)}" for name, each in self.memory.items() if each)
        sent = ", ".join(f"{name} {spell_bytes(each)}" for name, each in self.sent.items() if each)
        lines = [
            f"{self.setting}, on {self.machines}",
            f"  step {spell_time(self.step_seconds, 's')}, {self.tokens_per_second:,.0f} tokens/s, MFU {self.mfu:.1%}:",
            f"    {shares}",
            f"  memory {spell_bytes(self.peak)} at the most: {held}",
            *([f"  sent by a rank in a step: {sent}"] if sent else []),
            f"  stages start at {', '.join(self.split) or 'the first operation'}",
        ]
        return "\n".join([*lines, *([f"  not the best: {self.reason}"] if self.reason else [])])


@dataclass(frozen=True)
class TrainingPlans:
    """The plans found, the fastest that fits first, then those over the cap by the bytes that they lack."""

    plans: tuple[TrainingPlan, ...]
    considered: int = 0

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

    def __iter__(self) -> Iterator[TrainingPlan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def to_html(self, cap: int | None = None) -> str:
        """All plans as an HTML page of its own, time against bytes; `cap`: the bytes that a rank may hold, drawn as a line.

        Write the text to a file with `encoding="utf-8"`.
        """
        from graphpp.report.page_html import page_html  # the template: loaded by the first page

        known = (("machines", self.best.machines), ("best", str(self.best.setting))) if self.plans else ()
        facts = (*known, ("settings considered", f"{self.considered:,}"))
        return page_html(Page(title="Plans", facts=facts, plans=tuple(each.entry(cap) for each in self.plans), cap=cap))

    def to_json(self) -> str:
        """All plans as JSON text."""
        entries = [json.loads(each.to_json()) for each in self.plans]
        return json.dumps({"considered": self.considered, "plans": entries}, indent=1)

    def __str__(self) -> str:
        """A table: a line for each of the first plans; then the best one in full."""
        from rich import box  # loaded by the first result that is printed
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE)
        for column in ("", "mesh", "stages, schedule", "microbatches", "keep", "recompute"):
            table.add_column(column)
        for column in ("step", "MFU", "bubble", "bytes"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("reason")
        for number, each in enumerate(self.plans[:_SHOWN], 1):
            table.add_row(*_row(number, each))
        out = io.StringIO()
        Console(file=out, width=180, no_color=True).print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
        more = len(self.plans) - _SHOWN
        tail = [f"  and {more} more in .plans; {self.considered:,} settings were considered"] if more > 0 else []
        return "\n".join([*lines, *tail, str(self.best)] if self.plans else ["no plan"])


def _row(number: int, plan: TrainingPlan) -> tuple[str, ...]:
    setting = plan.setting
    return (
        f"{number}{'*' if plan.on_front else ''}", str(setting.shape), f"{setting.stages}, {setting.schedule}",
        f"{setting.microbatches} x {setting.rows}", "all" if setting.keep is None else str(setting.keep),
        str(setting.recompute or "-"), spell_time(plan.step_seconds, "s"), f"{plan.mfu:.1%}", f"{plan.bubble:.1%}",
        spell_bytes(plan.peak), plan.reason or "best",
    )  # fmt: skip


# ---------------------------------------------------------------------------------- reading JSON

_NESTED = {"setting": Setting, "shape": MeshShape, "schedule": ScheduleChoice, "seconds": StepSeconds}


def _document(text: str | Path) -> Mapping[str, Any]:
    try:
        given = json.loads(text.read_text() if isinstance(text, Path) else text)
    except (OSError, ValueError) as error:
        raise GraphPPError(f"plan: {error}") from error
    if not isinstance(given, dict):
        raise GraphPPError(f"plan: take JSON of TrainingPlan.to_json, got a {type(given).__name__}")
    return given


def _read(cls: type[Any], given: object, path: str) -> object:
    """An object of a dataclass from its JSON form. Raises `GraphPPError` for missing and unknown entries."""
    names = {item.name for item in fields(cls)}
    if not isinstance(given, dict) or set(given) - names:
        unknown = sorted(set(given) - names) if isinstance(given, dict) else given
        raise GraphPPError(f"{path}: take an object with {sorted(names)}, got {unknown!r}")
    values = {name: _value(name, each, f"{path}.{name}") for name, each in given.items()}
    try:
        return cls(**values)
    except (TypeError, ScheduleError) as error:
        raise GraphPPError(f"{path}: {error}") from error


def _value(name: str, given: object, path: str) -> object:
    if name in _NESTED and isinstance(given, dict):
        return _read(_NESTED[name], given, path)
    return tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else given
