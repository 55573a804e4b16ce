"""The part of a rank's row during which saved activations of one microbatch are in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.schedules.table.actions import Action


@dataclass(frozen=True)
class OffloadWindow:
    """Saved `values` of one stage and microbatch that are evicted and prefetched together; `nbytes` is their size.

    `evict_after` and `prefetch_at` are computing actions of the rank's row: the device memory of the values is free from the
    end of the first to the start of the second. `first_use`: the first computation (or part of an overlap) that reads them.
    """

    stage: int
    microbatch: int
    values: tuple[str, ...]
    nbytes: int
    evict_after: Action
    prefetch_at: Action
    first_use: Action
