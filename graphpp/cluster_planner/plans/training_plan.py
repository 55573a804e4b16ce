"""One plan of a search as data: its setting, its predicted cost, and why it is or is not the best.

Contract: a `TrainingPlan` contains only numbers and text. `to_json` and `from_json` are lossless. `graphpp.compile(model, loss,
plan=plan)` trains by it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from pathlib import Path

import torch

from graphpp.arguments import COUNT, INDEX, require
from graphpp.cluster_planner.plans.prediction.read_tables import counts_of, read_table
from graphpp.cluster_planner.plans.settings import ORDER, PlanSetting
from graphpp.devices import Goodput
from graphpp.errors import GraphPPError
from graphpp.from_json import document, read
from graphpp.report.comparison import Numbers, PlanComparison
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes, spell_time

_FORMAT = 1  # of the JSON text


@dataclass(frozen=True)
class StepSeconds:
    """The seconds of a step, as parts of the busiest rank's step.

    `forward`, `backward`: computation; `recompute`: repeated forwards; `collectives`: of `tp`, `ep` and `cp` within
    computations; `bubble`: waits for other ranks or messages; `gradients`: reductions and gathers along data ranks that no
    computation hides; `optimizer`: its step; `offload`: copies between device and host that no computation hides.
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


class RankBytes:
    """The peak bytes of each pipeline rank beside `caps`, the bytes that each may hold, if they are of unlike devices."""

    peaks: tuple[int, ...]
    caps: tuple[int, ...]

    @property
    def peak(self) -> int:
        """The most bytes on any rank at one time."""
        return max(self.peaks)

    @property
    def fullest(self) -> int:
        """The pipeline rank with the fewest bytes left."""
        return fullest_rank(self.peaks, self.caps)

    def over(self, cap: float) -> float:
        """The most bytes of a rank above its cap; at most 0 if all fit. `cap`: of each rank, if there are no `caps`."""
        return self.peaks[self.fullest] - (self.caps[self.fullest] if self.caps else cap)


def fullest_rank(peaks: Sequence[int], caps: Sequence[int]) -> int:
    return max(range(len(peaks)), key=lambda rank: peaks[rank] - (caps[rank] if caps else 0))


@dataclass(frozen=True)
class TrainingPlan(RankBytes):
    """One way to train a model on `machines`, with its predicted cost.

    `setting`: the choices of the search. `split`: FQNs at which stages start. `seconds`: of a step; `batch`: rows of a step on
    all ranks; `tokens`: of a row (0: none). `mfu`: model FLOPs over the peak FLOPs of all GPUs, without recomputation, with a
    backward as twice its forward; `hfu`: the FLOPs that run (0: unknown); both with half of the square of a causal attention.
    `dtype`: in which the model computes (None: its own). `peaks`: peak bytes of each pipeline rank; `memory`: by kind, the most
    bytes of the fullest rank. `sent`: bytes along each mesh dimension in a step, of the rank that sends most (expert shards
    under `dp_shard`). `reason`: why the plan is not the best, or is the best and not the fastest ("": the best and fastest).
    `on_front`: no other plan has both less time and less memory. `recomputed`: FQNs of the layers that `setting.recompute`
    covers, if not all. `float8`: the linear layers that compute in float8, as text (None: none). `costs`: the seconds of its
    stages, by which `timeline` simulates a step (None: unknown, in JSON of earlier versions). `error`: the 10th and 90th
    percentile of measured over predicted seconds in published runs of the same kind (None: none are known for the device).
    `host`: bytes of offloaded values in a machine's memory. On unlike devices, `machines` are in the order of the pipeline
    ranks, and `devices`, `caps` are the name of each pipeline rank's device and the bytes that it may hold. `moved`: the share
    of the seconds under the most balanced cut that moves of stage starts save (0: the stages are balanced). `bound`: seconds
    than which no cut of the model, no order and no placement of stages on as many pipeline ranks is faster, with the same mesh,
    microbatches and recomputation (0: unknown). A plan of measured costs has `machines` "measured", `split` () (the measured
    split stays) and `mfu` 0. Raises `GraphPPError` for inconsistent numbers.
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
    float8: str | None = None
    costs: Costs | None = field(default=None, repr=False)
    hfu: float = 0.0
    error: tuple[float, float] | None = None
    host: int = 0
    devices: tuple[str, ...] = ()
    caps: tuple[int, ...] = ()
    moved: float = 0.0
    bound: float = 0.0

    def __post_init__(self) -> None:
        require(GraphPPError, "plan.batch", COUNT, self.batch)
        require(GraphPPError, "plan.tokens", INDEX, self.tokens)
        if len(self.split) != self.setting.stages - 1 and not self.measured:
            raise GraphPPError(f"plan.split: take the names of {self.setting.stages - 1} stages, got {len(self.split)}")
        layers = sum(self.setting.recomputed or ())
        if len(self.recomputed) != layers:
            raise GraphPPError(f"plan.recomputed: take the names of {layers} layers, got {len(self.recomputed)}")
        for name in ("peaks", *(name for name in ("devices", "caps") if getattr(self, name))):
            if len(each := getattr(self, name)) != self.setting.shape.pp:
                raise GraphPPError(f"plan.{name}: take one for each of {self.setting.shape.pp} ranks, got {len(each)}")
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise GraphPPError(f"plan.dtype: take the name of a dtype of torch, or None, got {self.dtype!r}")
        if not self.seconds.total > 0:
            raise GraphPPError(f"plan.seconds: take positive seconds, got {self.seconds}")

    @property
    def measured(self) -> bool:
        """Whether the plan comes from measured costs. Such a plan decides only the schedule, the microbatches and `keep`."""
        return self.machines == "measured"

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the mesh dimensions, outermost first, as `init_device_mesh` takes them."""
        return self.setting.shape.needed(sharded=self.dtype is not None)

    @property
    def expert_mesh(self) -> dict[str, int] | None:
        """The sizes of `parallel.expert_mesh`, if experts are spread over `cp` or `tp` too; else None."""
        return self.setting.shape.of_experts(sharded=self.dtype is not None)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step."""
        return self.seconds.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all GPUs together."""
        return self.batch * self.tokens / self.step_seconds

    @property
    def utilization(self) -> str:
        """`mfu` as text; "-" in a plan of measured costs, which do not give FLOPs."""
        return "-" if self.measured else f"{self.mfu:.1%}"

    @property
    def bubble(self) -> float:
        """The share of a step in which the busiest rank waits."""
        return self.seconds.bubble / self.step_seconds

    def table(self) -> Schedule:
        """The pipeline's schedule."""
        return self.setting.schedule.table(self.setting.shape.pp, self.setting.microbatches)

    def timeline(self) -> Timeline:
        """A step of one pipeline, simulated, without the optimizer, copies to the host, what collectives take from computations
        beside them, and sums over copies of rows that nothing hides; of a step with many microbatches the first ones, which the
        search simulates. Raises `GraphPPError` for a plan without `costs`."""
        costs, setting = self.costs, self.setting
        if costs is None:
            raise GraphPPError("plan.costs: the seconds of its stages are unknown: search again with this version")
        sharded = self.dtype is not None or setting.shape.data_ranks * setting.shape.cp > 1
        found = read_table(setting.schedule, setting.shape.pp, counts_of(setting)[0], setting.keep, sharded)
        assert found is not None
        return simulate(found.schedule if costs.blocking else hoist_receives(found.schedule, costs.flow.ahead), costs)

    def goodput(self, *, mtbf_hours: float, save_seconds: float, restart_seconds: float) -> Goodput:
        """The share of the time that makes progress on GPUs that fail, and how often to save. `mtbf_hours`: mean hours between
        failures of one GPU. Raises `ScheduleError` for negative numbers."""
        return Goodput(self.step_seconds, self.setting.shape.ranks, mtbf_hours, save_seconds, restart_seconds)

    def to_json(self) -> str:
        """The plan as JSON text."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | Path) -> TrainingPlan:
        """Read a plan from JSON text or a file. Raises `GraphPPError` for other text, naming the entry."""
        given = document(text, "plan")
        if given.pop("format", None) != _FORMAT:
            several = ": TrainingPlans.from_json reads several plans" if "plans" in given else ""
            raise GraphPPError(f"plan: take JSON of TrainingPlan.to_json with format {_FORMAT}{several}")
        found: TrainingPlan = read(cls, given, "plan")
        return found

    @property
    def rate(self) -> str:
        """Tokens per second as text; rows per second if rows have no tokens."""
        count, unit = (self.tokens_per_second, "tokens/s") if self.tokens else (self.batch / self.step_seconds, "rows/s")
        return f"{count:,.0f} {unit}"

    @property
    def ranks(self) -> str:
        """On unlike devices, the pipeline ranks of each device with their most bytes beside what they may hold; else ""."""
        found, first = list[str](), 0
        for (device, cap), each in groupby(zip(self.devices, self.caps, strict=False)):
            end = first + len(list(each))
            most = f"{spell_bytes(max(self.peaks[first:end]))} of {spell_bytes(cap)}"
            found.append(f"{first if end - first == 1 else f'{first} to {end - 1}'} on {device}, {most}")
            first = end
        return "; ".join(found)

    @property
    def details(self) -> dict[str, str]:
        """Text by topic: shares of the seconds, bytes of each kind, bytes sent, stage starts."""
        parts = asdict(self.seconds)
        return {
            "seconds": ", ".join(f"{name} {each / self.step_seconds:.1%}" for name, each in parts.items() if each > 0),
            "memory": _bytes(self.memory),
            "sent by a rank in a step": _bytes(self.sent) or "nothing",
            **({"pipeline ranks": self.ranks} if self.ranks else {}),
            **({"recomputed layers": ", ".join(self.recomputed)} if self.recomputed else {}),
            **({"float8": self.float8} if self.float8 else {}),
            "stages start at": self._starts,
        }

    @property
    def _starts(self) -> str:
        return "as measured" if self.measured else ", ".join(self.split) or "the first operation"

    @property
    def _placement(self) -> str:
        """The stages of each rank under a searched order, else ""."""
        if self.setting.schedule.name != ORDER:
            return ""
        home = self.table().rank_of_stage
        ranks = ([str(stage) for stage in sorted(home) if home[stage] == rank] for rank in range(self.setting.shape.pp))
        return " | ".join(map(" ".join, ranks))

    @property
    def _choices(self) -> dict[str, str]:
        setting = self.setting
        return {
            "machines": self.machines,
            "batch": f"{self.batch} rows" + (f" of {self.tokens} tokens" if self.tokens else ""),
            "dtype": self.dtype or "the model's own",
            "float8": self.float8 or "-",
            "mesh": str(setting.shape),
            "schedule": f"{setting.schedule}, {setting.stages} stages",
            "microbatches x rows": f"{setting.microbatches} x {setting.rows}",
            "whole stages kept": "all" if setting.keep is None else str(setting.keep),
            "recompute": setting.degree,
            "offload": "-" if setting.offload is None else f"{setting.offload:g}",
            "stages of each rank": self._placement or "as the schedule has them",
            "stages start at": self._starts,
        }

    @property
    def _range(self) -> str:
        if self.error is None:
            return ""
        low, high = (spell_time(self.step_seconds * each, "s") for each in self.error)
        return f" ({low} to {high} for 80 % of published runs like it)"

    @property
    def over_bound(self) -> str:
        """By how much the step is longer than `bound`, as text; "-" if it is unknown."""
        return f"{self.step_seconds / self.bound - 1:.1%}" if self.bound else "-"

    @property
    def _beside_mfu(self) -> str:
        hardware = f" (hardware {self.hfu:.1%})" if self.hfu else ""
        return hardware + (f", {self.over_bound} over the lower bound of {spell_time(self.bound, 's')}" if self.bound else "")

    @property
    def _numbers(self) -> Numbers:
        """The predictions by name and unit, in table order."""
        return {
            ("step", "seconds"): self.step_seconds,
            **({("lower bound", "seconds"): self.bound} if self.bound else {}),
            **{(name, "seconds"): each for name, each in asdict(self.seconds).items()},
            ("share of the bubble", "share"): self.bubble,
            ("MFU", "share"): self.mfu,
            ("HFU", "share"): self.hfu,
            ("tokens a second", "per second"): self.tokens_per_second,
            ("rows a second", "per second"): self.batch / self.step_seconds,
            ("memory at the most", "bytes"): self.peak,
            **{(name, "bytes"): nbytes for name, nbytes in self.memory.items()},
            **({("offloaded, in a machine's memory", "bytes"): self.host} if self.host else {}),
            **{(f"sent along {name}", "bytes"): nbytes for name, nbytes in self.sent.items()},
        }

    def compare(self, other: TrainingPlan) -> PlanComparison:
        """This plan and another side by side: choices, seconds, bytes, and differences."""
        return PlanComparison((self._choices, other._choices), (self._numbers, other._numbers))

    def __str__(self) -> str:
        shares, held, sent, *_, starts = self.details.values()
        ranks = [f"  pipeline ranks {self.ranks}"] if self.ranks else []
        lines = [
            f"{self.setting}, on {self.machines}",
            f"  step {spell_time(self.step_seconds, 's')}{self._range}, {self.rate}, MFU {self.utilization}{self._beside_mfu}:",
            f"    {shares}",
            f"  memory {spell_bytes(self.peak)} at the most: {held}",
            *ranks,
            *([f"  offloaded values take {spell_bytes(self.host)} of a machine's memory"] if self.host else []),
            f"  sent by a rank in a step: {sent}",
            f"  stages start at {starts}{f' (moved: {self.moved:.1%} less than with balanced stages)' if self.moved else ''}",
            *([f"  stages of each rank: {self._placement}"] if self._placement else []),
            *([f"  float8: {self.float8}"] if self.float8 else []),
        ]
        return "\n".join([*lines, *([f"  {self.reason}"] if self.reason else [])])


def _bytes(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {spell_bytes(nbytes)}" for name, nbytes in sizes.items() if nbytes)
