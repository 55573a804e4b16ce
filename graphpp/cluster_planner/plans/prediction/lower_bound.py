"""A lower bound of the seconds of a step: no cut, order or placement of the same work on as many pipeline ranks is faster.

In: the costs of the segments, which no stage divides, and of the messages after them. The bound is the largest of

- the work of all microbatches, divided evenly; programs hide no more than all collectives, or all other computation;
- the work of all microbatches in the heaviest segment;
- the path of one microbatch through all segments, and over the cheapest boundaries, of which each further rank adds one.

A backward is whole or split, and recomputes in line or by an R (`StageCosts.ahead`), as it is faster. Gathers and reductions
are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts

_BACKWARDS = ((Kind.B,), (Kind.I, Kind.W))


def least_seconds(segments: Costs, ranks: int, microbatches: int) -> float:
    woven, parts = min(1.0, segments.overlap), segments.stages
    share = max(segments.hidden, *(_hidden_alone(part) for part in parts))
    forms = [[_work(part, kinds, ahead) for kinds in _BACKWARDS for ahead in _ways(part)] for part in parts]
    exchanged, computed = (sum(max(form[at] for form in each) for each in forms) for at in (0, 1))
    total = sum(min(map(sum, each)) for each in forms) - share * min(exchanged, computed)
    heaviest = max(min(sum(form) - share * min(form) for form in each) for each in forms)
    back = (min(part.of(kinds[0], ahead) for kinds in _BACKWARDS for ahead in _ways(part)) for part in parts)
    path = woven * sum(part.forward + each for part, each in zip(parts, back, strict=True))
    sends = [segments.sends_forward, segments.sends_backward]
    crossing = sorted(map(sum, zip(*filter(None, sends), strict=True)))[: ranks - 1]
    return max(woven * microbatches * max(total / ranks, heaviest), path + sum(crossing))


def _ways(part: StageCosts) -> Sequence[bool]:
    """Whether an R may precede a backward."""
    return (False,) if part.ahead is None else (False, True)


def _work(part: StageCosts, backward: Sequence[Kind], ahead: bool) -> tuple[float, float]:
    """Seconds of collectives, and of other computation."""
    kinds = (Kind.F, *((Kind.R,) if ahead else ()), *backward)
    each = [part.lines(kind, ahead) for kind in kinds]
    return sum(one.exchanged for one in each), sum(one.computed for one in each)


def _hidden_alone(part: StageCosts) -> float:
    """The largest share of the collectives, or of the other computation if that is less, that a single program hides."""
    each = [part.lines(kind, ahead) for ahead in _ways(part) for kind in (Kind.F, Kind.B, Kind.I, Kind.W)]
    return max(one.both / min(one.exchanged, one.computed) if one.both else 0.0 for one in each)
