"""The offload windows of a setting, equal to those that a pipeline run by the plan chooses (`planner/offload_windows.py`)."""

from __future__ import annotations

from collections.abc import Iterator

from graphpp.cluster_planner.costs.price import PricedModel
from graphpp.options.offload import Offload
from graphpp.planner.offload_windows import Leaving, SavedValues, windows_of
from graphpp.planner.segments import Cut
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Schedule


def windows_of_setting(priced: PricedModel, cut: Cut, table: Schedule, fraction: float) -> tuple[OffloadWindow, ...]:
    """The windows under a table that offload a `fraction` of the saved bytes, with otherwise default `graphpp.Offload`."""
    usual = Offload(fraction)
    ends = [*cut[1:], len(priced.offloadable)]
    saved: list[SavedValues] = []
    for stage, (first, end) in enumerate(zip(cut, ends, strict=True)):
        nbytes = sum(part.saved_bytes for part in priced.segments.costs.stages[first:end])
        values = [each for each in _leaving(priced, range(first, end), table, stage) if each.nbytes >= usual.least_bytes]
        saved.append(SavedValues(nbytes, sorted(values, key=lambda each: -each.nbytes)))
    return tuple(windows_of(table, usual.fraction, usual.ahead, lambda stage, _: saved[stage]))


def _leaving(priced: PricedModel, segments: range, table: Schedule, stage: int) -> Iterator[Leaving]:
    """The values of a stage that may be offloaded: not those that a neighbouring stage of the same rank made or reads."""
    rank_of = table.rank_of_stage
    below, above = (rank_of.get(other) == rank_of[stage] for other in (stage - 1, stage + 1))
    for segment in segments:
        for number, value in enumerate(priced.offloadable[segment]):
            first, last = segment == segments[0], segment == segments[-1]
            if not (value.received and first and below) and not (value.sent and last and above):
                yield Leaving(f"{segment}.{number}", value.nbytes, value.readers)
