"""The stretch of a rank's row during which some saved activations of one microbatch are in the host's memory.

Contract: plain data. The planner decides the windows of a table, `graphpp.schedules.check.row_moments` leaves their bytes out
of a rank's memory, and the runtime moves the values.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.schedules.table.actions import Action


@dataclass(frozen=True)
class OffloadWindow:
    """Saved `values` of one stage and microbatch that are evicted and prefetched together; `nbytes` is their size.

    `evict_after` and `prefetch_at` are computing actions of the rank's row: the device memory of the values is free from
    the end of the first to the start of the second. `first_use` is the computation that reads the values first; it may be
    one part of an overlap.
    """

    stage: int
    microbatch: int
    values: tuple[str, ...]
    nbytes: int
    evict_after: Action
    prefetch_at: Action
    first_use: Action
