"""The offload windows of a setting, equal to those that a pipeline run by the plan chooses (`planner/offload_windows.py`), and
the bytes that they take of a machine's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from graphpp.cluster_planner.costs.price import PricedModel
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.devices import Machines
from graphpp.options.offload import Offload
from graphpp.planner.offload_windows import Leaving, SavedValues, windows_of
from graphpp.planner.segments import Cut
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Row, Schedule


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


def host_bytes(table: Schedule, windows: Sequence[OffloadWindow], shape: MeshShape, machines: Sequence[Machines]) -> int:
    """The most bytes of offloaded values in the memory of a machine. Each value has room from its eviction until the first
    computation that reads it; all ranks of a machine count with their own maxima. `machines`: of each pipeline rank."""
    if not windows:
        return 0
    own = [[each for each in windows if table.rank_of_stage[each.stage] == rank] for rank in range(table.ranks)]
    most = [_on_host(row, each) for row, each in zip(table.table, own, strict=True)]
    found = 0
    for group in {id(each): each for each in machines}.values():
        alike = min(shape.stride("pp"), group.per_machine)  # ranks of a machine with the same pipeline rank
        others = max(1, group.per_machine // shape.stride("pp"))
        here = [nbytes for nbytes, each in zip(most, machines, strict=True) if each is group]
        found = max(found, alike * max(sum(here[first : first + others]) for first in range(0, len(here), others)))
    return found


def _on_host(row: Row, windows: Sequence[OffloadWindow]) -> int:
    """The most bytes of one rank at one time."""
    columns = {each: at for at, action in enumerate(row) if action for each in (action, *action.leaves)}
    changes = [0] * (len(row) + 1)
    for each in windows:
        changes[columns[each.evict_after]] += each.nbytes
        changes[columns[each.first_use]] -= each.nbytes
    return max(accumulate(changes))


def _leaving(priced: PricedModel, segments: range, table: Schedule, stage: int) -> Iterator[Leaving]:
    """The values of a stage that may be offloaded: not those that a neighbouring stage of the same rank made or reads."""
    rank_of = table.rank_of_stage
    below, above = (rank_of.get(other) == rank_of[stage] for other in (stage - 1, stage + 1))
    for segment in segments:
        for number, value in enumerate(priced.offloadable[segment]):
            first, last = segment == segments[0], segment == segments[-1]
            if not (value.received and first and below) and not (value.sent and last and above):
                yield Leaving(f"{segment}.{number}", value.nbytes, value.readers)
