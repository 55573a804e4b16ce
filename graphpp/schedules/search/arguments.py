"""Read the arguments of the scheduler: counts, bytes per rank, and the placements of stages to try. Raises `ScheduleError`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf

from graphpp.arguments import INDEX, shown
from graphpp.errors import ScheduleError
from graphpp.schedules.check.step_memory import peak_bytes
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule

Home = Mapping[int, int]
_MOST = 2**16


def check_size(ranks: int, microbatches: int) -> None:
    """Raise `ScheduleError` for a problem that takes too long to search."""
    if ranks * microbatches > _MOST:
        raise ScheduleError(
            f"a search over {ranks:,} ranks and {microbatches:,} microbatches takes too long: take at most {_MOST:,} ranks "
            "times microbatches, or a named schedule"
        )


def caps_of(memory_cap: int | Sequence[int] | None, ranks: int) -> list[float]:
    """The bytes that each rank may have alive; infinite without a cap."""
    if memory_cap is None:
        return [inf] * ranks
    caps = list(memory_cap) if isinstance(memory_cap, Sequence) else [memory_cap] * ranks
    if not all(isinstance(cap, int | float) and cap == cap for cap in caps):
        raise ScheduleError(f"memory_cap={memory_cap!r} is no number of bytes; give one, or one for each of {ranks} ranks")
    if len(caps) != ranks:
        raise ScheduleError(f"memory_cap gives {len(caps)} ranks their bytes, but there are {ranks}; give one or {ranks}")
    return [float(cap) for cap in caps]


def placements(stages: int, placement: str | Home | None, ranks: int) -> list[dict[int, int]]:
    """The placements to try, each a mapping stage -> rank; for "free" those with which its search starts."""
    if isinstance(placement, Mapping) and all(map(INDEX.accepts, (*placement, *placement.values()))):
        if sorted(placement) != list(range(stages)):
            raise ScheduleError(f"the placement names stages {sorted(placement)}; it has to name each of 0..{stages - 1}")
        for stage, rank in placement.items():
            if rank >= ranks:
                raise ScheduleError(f"the placement puts stage {stage} on rank {rank}; ranks are 0..{ranks - 1}")
        return [{stage: placement[stage] for stage in range(stages)}]
    if isinstance(placement, Mapping) or placement not in (None, "loop", "v", "free"):
        known = "'loop', 'v', 'free', a mapping stage -> rank, or None"
        raise ScheduleError(f"unknown placement {shown(placement)}; take {known}")
    if stages < 1 or (stages % ranks and placement != "free"):
        raise ScheduleError(
            f"{stages} stages cannot be dealt evenly to {ranks} ranks; give placement=\"free\" or {{stage: rank, ...}}, or the "
            f"costs of a multiple of {ranks} stages"
        )
    loop, v = (dict(enumerate(each)) for each in (loop_of(stages, ranks), v_of(stages, ranks)))
    if placement in (None, "free"):
        return [loop] if loop == v else [v, loop]
    return [loop if placement == "loop" else v]


def loop_of(stages: int, ranks: int) -> tuple[int, ...]:
    return tuple(stage % ranks for stage in range(stages))


def v_of(stages: int, ranks: int) -> tuple[int, ...]:
    """Down the ranks and up again."""
    return tuple(stage % ranks if stage // ranks % 2 == 0 else ranks - 1 - stage % ranks for stage in range(stages))


def one_by_one(costs: Costs, home: Home, ranks: int, microbatches: int) -> Schedule:
    """The table with the least memory: one microbatch after the other, each backward whole or split, whichever needs less."""
    rows: list[list[Action | None]] = [[] for _ in range(ranks)]
    forms = [min(_BACKWARD_FORMS, key=partial(_most, each)) for each in costs.stages]
    for microbatch in range(microbatches):
        for stage in range(len(costs.stages)):
            rows[home[stage]].append(Action(stage, Kind.F, microbatch))
        for stage, kinds in reversed(list(enumerate(forms))):
            rows[home[stage]] += [Action(stage, kind, microbatch) for kind in kinds]
    return Schedule(tuple(map(tuple, rows)), len(costs.stages), microbatches, "one by one")


def too_tight(costs: Costs, homes: Sequence[Home], caps: Sequence[float]) -> ScheduleError:
    """The error for caps under which not even one microbatch runs; it names sufficient caps."""
    needs = [peak_bytes(one_by_one(costs, home, len(caps), 1), costs) for home in homes]
    least = min(needs, key=max)
    given = [int(cap) if cap < inf else None for cap in caps]
    return ScheduleError(
        f"memory_cap admits no schedule: one microbatch alone needs {list(least)} bytes on the ranks, and the caps are "
        f"{given}; raise it to at least {max(least)}, or cut smaller stages or microbatches"
    )


_BACKWARD_FORMS = ((Kind.I, Kind.W), (Kind.B,))


def _most(each: StageCosts, kinds: Sequence[Kind]) -> int:
    """The most bytes alive for one microbatch of a stage while its backward runs as `kinds`."""
    live = most = each.saved_bytes
    for kind in kinds:
        start, end = each.change(kind)
        most = max(most, live + start)
        live += start + end
    return most
