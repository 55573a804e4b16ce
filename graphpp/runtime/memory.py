"""The bytes alive on each rank while the events of a step run, by the contract of `graphpp.runtime.costs`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate

from graphpp.runtime.actions import Action, Kind
from graphpp.runtime.costs import Costs
from graphpp.runtime.timeline import Event

Curve = tuple[tuple[float, int], ...]


def followed(events: Sequence[Event], costs: Costs, ranks: int) -> tuple[Curve, ...]:
    """For each rank (time, bytes alive from then on); what one action frees and the next one takes at a time is one change."""
    changes: list[dict[float, int]] = [defaultdict(int) for _ in range(ranks)]
    for event in events:
        for leaf in event.action.leaves if event.action.is_compute else ():
            for time, count in _changes(event, leaf, costs):
                changes[event.rank][time] += count
    return tuple(_curve(found) for found in changes)


def _changes(event: Event, leaf: Action, costs: Costs) -> Iterator[tuple[float, int]]:
    stage = costs.stages[leaf.stage]
    kept = stage.saved_bytes if stage.kept_bytes is None else stage.kept_bytes
    match leaf.kind:
        case Kind.F:
            yield event.start, stage.saved_bytes
        case Kind.B:
            yield event.end, -stage.saved_bytes
        case Kind.I:
            yield event.end, kept - stage.saved_bytes
        case Kind.W:
            yield event.end, -kept


def _curve(changes: dict[float, int]) -> Curve:
    times = sorted(changes)
    return tuple(zip(times, accumulate(changes[time] for time in times), strict=True))
