"""A lower bound of the seconds of a step: no cut, order or placement of the same work on as many pipeline ranks is faster.

In: the costs of the segments, which no stage divides, and of the messages after them. The bound is the largest of

- the work of all microbatches, divided evenly; pairs hide no more than all collectives, or all other computation;
- the work of all microbatches in the heaviest segment;
- the path of one microbatch through all segments, and over the cheapest boundaries, of which each further rank adds one.

A backward is whole or split as it is faster. Gathers and reductions are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts

_FORMS = ((Kind.F, Kind.B), (Kind.F, Kind.I, Kind.W))


def least_seconds(segments: Costs, ranks: int, microbatches: int) -> float:
    woven, parts = min(1.0, segments.overlap), segments.stages
    forms = [[_work(part, kinds) for kinds in _FORMS] for part in parts]
    exchanged, computed = (sum(max(form[at] for form in each) for each in forms) for at in (0, 1))
    total = sum(min(map(sum, each)) for each in forms) - segments.hidden * min(exchanged, computed)
    heaviest = max(min(sum(form) - segments.hidden * min(form) for form in each) for each in forms)
    path = woven * sum(part.forward + min(part.input_grad, part.of(Kind.B)) for part in parts)
    sends = [segments.sends_forward, segments.sends_backward]
    crossing = sorted(map(sum, zip(*filter(None, sends), strict=True)))[: ranks - 1]
    return max(woven * microbatches * max(total / ranks, heaviest), path + sum(crossing))


def _work(part: StageCosts, kinds: Sequence[Kind]) -> tuple[float, float]:
    """Seconds of collectives, and of other computation."""
    exchanged = sum(map(part.own_collectives, kinds))
    return exchanged, sum(map(part.of, kinds)) - exchanged
