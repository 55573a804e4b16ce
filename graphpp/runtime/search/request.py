"""What a schedule is asked for: counts, bytes per rank, and where the stages may stand.

Contract
    Every function returns what the search needs or raises `ScheduleError` saying what would fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from graphpp.errors import ScheduleError
from graphpp.runtime.actions import Kind
from graphpp.runtime.costs import Costs

Home = Mapping[int, int]


def check_counts(ranks: int, microbatches: int) -> None:
    """At least one of each."""
    if ranks < 1 or microbatches < 1:
        raise ScheduleError(f"a schedule needs at least one rank and one microbatch, not {ranks} and {microbatches}")


def caps_of(memory_cap: int | Sequence[int] | None, ranks: int) -> list[float]:
    """The bytes of each rank; without a cap any number."""
    if memory_cap is None:
        return [inf] * ranks
    caps = [memory_cap] * ranks if isinstance(memory_cap, int) else list(memory_cap)
    if len(caps) != ranks:
        raise ScheduleError(
            f"memory_cap gives {len(caps)} ranks their bytes, but there are {ranks}; give one or {ranks}"
        )
    return [float(cap) for cap in caps]


def placements(stages: int, placement: str | Home | None, ranks: int) -> list[dict[int, int]]:
    """The placements to try, each stage -> rank."""
    if placement is not None and not isinstance(placement, str):
        return [_given(stages, placement, ranks)]
    if placement not in (None, "loop", "v"):
        raise ScheduleError(f"unknown placement {placement!r}; take 'loop', 'v', a mapping stage -> rank, or None")
    if stages < 1 or stages % ranks:
        raise ScheduleError(
            f"{stages} stages cannot be dealt evenly to {ranks} ranks; give placement={{stage: rank, ...}}, or the costs "
            f"of a multiple of {ranks} stages"
        )
    loop = {stage: stage % ranks for stage in range(stages)}
    v = {stage: stage % ranks if stage // ranks % 2 == 0 else ranks - 1 - stage % ranks for stage in range(stages)}
    if placement is None:
        return [loop] if loop == v else [v, loop]
    return [loop if placement == "loop" else v]


def _given(stages: int, placement: Home, ranks: int) -> dict[int, int]:
    if sorted(placement) != list(range(stages)):
        raise ScheduleError(f"the placement names stages {sorted(placement)}; it has to name each of 0..{stages - 1}")
    for stage, rank in placement.items():
        if not 0 <= rank < ranks:
            raise ScheduleError(f"the placement puts stage {stage} on rank {rank}; ranks are 0..{ranks - 1}")
    return {stage: placement[stage] for stage in range(stages)}


def working_bytes(costs: Costs, home: Home, ranks: int) -> list[int]:
    """The most that a program takes on each rank while it runs, beside what is saved before or after it."""
    most = [0] * ranks
    for stage, rank in home.items():
        each = costs.stages[stage]
        starts = {kind: each.change(kind)[0] for kind in (Kind.F, Kind.B, Kind.I, Kind.W)}
        most[rank] = max(most[rank], starts.pop(Kind.F) - each.saved_bytes, *starts.values())
    return most


def roomy(costs: Costs, homes: list[dict[int, int]], caps: Sequence[float]) -> list[dict[int, int]]:
    """The placements under which a microbatch gets through: each rank holds the activations of all its stages."""
    needs = [working_bytes(costs, home, len(caps)) for home in homes]
    for need, home in zip(needs, homes, strict=True):
        for stage, rank in home.items():
            need[rank] += costs.stages[stage].saved_bytes
    roomy = [home for need, home in zip(needs, homes, strict=True) if all(map(float.__le__, map(float, need), caps))]
    if not roomy:
        least = min(needs, key=max)
        raise ScheduleError(
            f"memory_cap admits no schedule: one microbatch alone needs {least} bytes on the ranks, and the caps are "
            f"{caps}; raise it to at least {max(least)}, or cut smaller stages or microbatches"
        )
    return roomy
