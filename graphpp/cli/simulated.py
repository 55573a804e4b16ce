"""One simulated step of a table, as the commands on schedules print it.

Without costs F = I = W = 1 for each rank and microbatch, and activations are counted in microbatches of a whole rank; with
costs the units are seconds and bytes.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from graphpp.errors import ScheduleError
from graphpp.from_json import document, read
from graphpp.schedules.simulate.simulator import timelines_of
from graphpp.schedules.simulate.timeline import Timeline
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes, spell_time

_UNIT_BYTES = 1000  # of `Costs.unit`: the activations of one microbatch on all stages of a rank


def read_costs(path: Path) -> Costs:
    """Read costs as `json.dumps(asdict(costs))` writes them. Raises `GraphPPError` with the file and the field."""
    found: Costs = read(Costs, document(path, str(path)), str(path))
    if not found.stages:
        raise ScheduleError(f"{path}: take the costs of one stage or more")
    return found


@dataclass(frozen=True)
class Simulated:
    """A timeline, and whether its numbers are units (of `Costs.unit`) or seconds and bytes."""

    timeline: Timeline
    costs: Costs
    units: bool

    @property
    def makespan(self) -> str:
        """The time of the step, with its unit."""
        return self.time(self.timeline.makespan)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time in which they are idle."""
        ranks = range(self.timeline.schedule.ranks)
        return sum(map(self.timeline.bubble, ranks)) / max(len(ranks), 1)

    @property
    def peak(self) -> str:
        """The highest peak memory of a rank."""
        ranks = range(self.timeline.schedule.ranks)
        return self.size(max(ranks, key=self.timeline.peak_bytes, default=0))

    def time(self, time: float) -> str:
        return f"{time:g} units" if self.units else spell_time(time, "s")

    def size(self, rank: int) -> str:
        """The peak memory of a rank, with its unit."""
        count = self.timeline.peak_bytes(rank) if self.timeline.memory else 0
        return f"{count / _UNIT_BYTES:g} microbatch{'es' * (count != _UNIT_BYTES)}" if self.units else spell_bytes(count)

    def document(self) -> dict[str, object]:
        """The numbers as data, with the costs as `read_costs` reads them."""
        ranks = range(self.timeline.schedule.ranks)
        return {
            **facts_of(self.timeline.schedule),
            "makespan": self.timeline.makespan,
            "bubble": self.bubble,
            "ranks_busy": [self.timeline.busy(rank) for rank in ranks],
            "ranks_bubble": [self.timeline.bubble(rank) for rank in ranks],
            "ranks_peak_bytes": [self.timeline.peak_bytes(rank) for rank in ranks],
            "costs": asdict(self.costs),
        }


def simulated(table: Schedule, costs: Costs | None) -> Simulated:
    """Simulate a step with these costs, or with unit costs. Raises `ScheduleError`."""
    (timeline,) = timelines_of([table], costs)
    return Simulated(timeline, costs or Costs.unit(table.stages, table.ranks), units=costs is None)


def facts_of(table: Schedule) -> dict[str, object]:
    """The name and the counts of a table as data."""
    return {"name": table.name, "ranks": table.ranks, "stages": table.stages, "microbatches": table.microbatches}


def spell_counts(table: Schedule) -> str:
    """The counts of a table in words: `2 ranks, 4 stages, 1 microbatch`."""
    counts = (table.ranks, "rank", "s"), (table.stages, "stage", "s"), (table.microbatches, "microbatch", "es")
    return ", ".join(f"{count} {name}{ending * (count != 1)}" for count, name, ending in counts)
