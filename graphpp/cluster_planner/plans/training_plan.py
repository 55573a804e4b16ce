"""A plan that a search has found, as data: its setting, its predicted cost, and why it is not the best.

Contract: a `TrainingPlan` holds numbers and text alone. `to_json` and `from_json` lose nothing; equal plans are equal.
`graphpp.compile(model, loss, plan=plan)` trains by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch

from graphpp.arguments import COUNT, INDEX, require
from graphpp.cluster_planner.plans.settings import PlanSetting
from graphpp.errors import GraphPPError
from graphpp.from_json import document, read
from graphpp.report.comparison import Numbers, PlanComparison
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes, spell_time

_FORMAT = 1  # of the JSON text


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step, added up on the rank that computes most.

    `forward`, `backward`: computation; `recompute`: forwards that are repeated; `collectives`: of `tp`, `ep` and `cp` within
    the computation; `bubble`: the rank waits for others or for messages; `gradients`: reductions and gathers along data ranks
    that no computation hides; `optimizer`: its step; `offload`: copies between the device and the host that no computation
    hides.
    """

    forward: float = 0.0
    backward: float = 0.0
    recompute: float = 0.0
    collectives: float = 0.0
    bubble: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    offload: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True)
class TrainingPlan:
    """One way to train a model on `machines`, with its predicted cost.

    `setting`: all that the search chooses. `split`: the FQNs at which the stages start; () in a plan of measured costs, whose
    split is that of the measured pipeline, and whose `machines` are "measured". `seconds`: of a step; `batch`: rows of a step
    on all ranks; `tokens`: of a row (0: it has none). `mfu`: FLOPs of the model, without repeated ones, by the peak of all
    GPUs (0: measured costs). `dtype`: in which the model computes (None: its own). `peaks`: by pipeline rank, the most bytes
    at one time; `memory`: of the fullest rank, the most bytes of each kind. `sent`: the bytes that the rank with most sends
    along each dimension of the mesh in a step (those of experts' shards under `dp_shard`). `reason`: why the plan is not the
    best; "" for the best. `on_front`: no other plan has both less time and less memory. `recomputed`: the FQNs of the layers
    that `setting.recompute` is for, where it is not for all. Raises `GraphPPError` for numbers that do not belong together.
    """

    machines: str
    setting: PlanSetting
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
    recomputed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(GraphPPError, "plan.batch", COUNT, self.batch)
        require(GraphPPError, "plan.tokens", INDEX, self.tokens)
        if len(self.split) != self.setting.stages - 1 and not self.measured:
            raise GraphPPError(f"plan.split: take the names of {self.setting.stages - 1} stages, got {len(self.split)}")
        layers = sum(self.setting.recomputed or ())
        if len(self.recomputed) != layers:
            raise GraphPPError(f"plan.recomputed: take the names of {layers} layers, got {len(self.recomputed)}")
        if len(self.peaks) != self.setting.shape.pp:
            raise GraphPPError(f"plan.peaks: take the bytes of {self.setting.shape.pp} ranks, got {len(self.peaks)}")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise GraphPPError(f"plan.dtype: take the name of a dtype of torch, or None, got {self.dtype!r}")
        if not self.seconds.total > 0:
            raise GraphPPError(f"plan.seconds: take positive seconds, got {self.seconds}")

    @property
    def measured(self) -> bool:
        """Whether the plan is one of measured costs: it decides the schedule, the microbatches and `keep` alone."""
        return self.machines == "measured"

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
    def utilization(self) -> str:
        """`mfu` as text; "-" in a plan of measured costs, which tell nothing of it."""
        return "-" if self.measured else f"{self.mfu:.1%}"

    @property
    def bubble(self) -> float:
        """The share of a step in which the rank that computes most waits for others."""
        return self.seconds.bubble / self.step_seconds

    @property
    def peak(self) -> int:
        """The most bytes at one time on any rank."""
        return max(self.peaks)

    def table(self) -> Schedule:
        """The schedule of a pipeline."""
        return self.setting.schedule.table(self.setting.shape.pp, self.setting.microbatches)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TrainingPlan:
        """The plan of a JSON text, or of a file of it. Raises `GraphPPError` for another text, naming the entry."""
        given = document(text, "plan")
        if given.pop("format", None) != _FORMAT:
            several = ": TrainingPlans.from_json reads several plans" if "plans" in given else ""
            raise GraphPPError(f"plan: take JSON of TrainingPlan.to_json with format {_FORMAT}{several}")
        found: TrainingPlan = read(cls, given, "plan")
        return found

    @property
    def rate(self) -> str:
        """The tokens, or where a row has none the rows, in a second, as text."""
        count, unit = (self.tokens_per_second, "tokens/s") if self.tokens else (self.batch / self.step_seconds, "rows/s")
        return f"{count:,.0f} {unit}"

    @property
    def details(self) -> dict[str, str]:
        """Text by topic: the shares of the seconds, the bytes of each kind, the bytes sent, where stages start."""
        parts = asdict(self.seconds)
        return {
            "seconds": ", ".join(f"{name} {each / self.step_seconds:.1%}" for name, each in parts.items() if each > 0),
            "memory": _bytes(self.memory),
            "sent by a rank in a step": _bytes(self.sent) or "nothing",
            **({"recomputed layers": ", ".join(self.recomputed)} if self.recomputed else {}),
            "stages start at": self._starts,
        }

    @property
    def _starts(self) -> str:
        return "as measured" if self.measured else ", ".join(self.split) or "the first operation"

    @property
    def _choices(self) -> dict[str, str]:
        """The machines, the batch and the choices, as text."""
        setting = self.setting
        return {
            "machines": self.machines,
            "batch": f"{self.batch} rows" + (f" of {self.tokens} tokens" if self.tokens else ""),
            "dtype": self.dtype or "the model's own",
            "mesh": str(setting.shape),
            "schedule": f"{setting.schedule}, {setting.stages} stages",
            "microbatches x rows": f"{setting.microbatches} x {setting.rows}",
            "whole stages kept": "all" if setting.keep is None else str(setting.keep),
            "recompute": setting.degree,
            "offload": "-" if setting.offload is None else f"{setting.offload:g}",
            "stages start at": self._starts,
        }

    @property
    def _numbers(self) -> Numbers:
        """The predictions by name and unit, in the order of a table."""
        return {
            ("step", "seconds"): self.step_seconds,
            **{(name, "seconds"): each for name, each in asdict(self.seconds).items()},
            ("share of the bubble", "share"): self.bubble,
            ("MFU", "share"): self.mfu,
            ("tokens a second", "per second"): self.tokens_per_second,
            ("rows a second", "per second"): self.batch / self.step_seconds,
            ("memory at the most", "bytes"): self.peak,
            **{(name, "bytes"): nbytes for name, nbytes in self.memory.items()},
            **{(f"sent along {name}", "bytes"): nbytes for name, nbytes in self.sent.items()},
        }

    def compare(self, other: TrainingPlan) -> PlanComparison:
        """This plan and another one side by side: their choices, seconds, bytes by kind, bytes sent, and the differences."""
        return PlanComparison((self._choices, other._choices), (self._numbers, other._numbers))

    def __str__(self) -> str:
        """Some lines: the setting, the time by its parts, the memory by kind."""
        shares, held, sent, *_, starts = self.details.values()
        lines = [
            f"{self.setting}, on {self.machines}",
            f"  step {spell_time(self.step_seconds, 's')}, {self.rate}, MFU {self.utilization}:",
            f"    {shares}",
            f"  memory {spell_bytes(self.peak)} at the most: {held}",
            f"  sent by a rank in a step: {sent}",
            f"  stages start at {starts}",
        ]
        return "\n".join([*lines, *([f"  not the best: {self.reason}"] if self.reason else [])])


def _bytes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {spell_bytes(nbytes)}" for name, nbytes in sizes.items() if nbytes)
