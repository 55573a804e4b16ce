"""Decide whether a model whose forward changes numbers in attributes has the same graph in every call.

A trace has the numbers of one call. `same_in_every_call` traces again, in the state that the first call leaves, and accepts

- an overwritten number: the forward writes the attribute before reading it, so no call depends on the earlier number;
- a last number: the second call leaves the number of the first call, and both calls have the same graph. By induction so has
  every later call. Swin, for instance, clamps its window to the size of the image;
- a counter: an integer to which each call adds the same integer. The third trace has an `UnknownInteger` in its place, which
  raises for every use but additions, so no branch and no value of the graph depends on the number.

All traces must give the same graph. `CaptureError` names every other number, with the user's line that reads it.

A flag (bool, text or None) that the first call changes is accepted if the second call has the same graph, and keeps its first
value. A flag beside which the first call makes a cache is accepted too: the trace cannot give a second call the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch

from graphpp.capture.attributes.entry_state import Accesses, EntryState
from graphpp.capture.attributes.exported import Exported, alike
from graphpp.capture.attributes.unknown_integer import UnknownInteger
from graphpp.capture.attributes.updates import Effect, NumberUpdate, Place
from graphpp.capture.attributes.writes import Change
from graphpp.errors import CaptureError

Changes = Mapping[Place, Change]
Export = Callable[[EntryState], Exported]


@dataclass(frozen=True)
class Decided:
    """The export of which the graph is made, the numbers on entry to it, and the changes by each call."""

    exported: Exported
    entry: EntryState
    updates: tuple[NumberUpdate, ...] = ()


def same_in_every_call(first: Exported, entry: EntryState, export: Export) -> Decided:
    """The export to use. `first`: the export on `entry`. Raises `CaptureError` if calls differ, or may differ."""
    for place, line in first.found.accesses.reads.items():
        raise CaptureError(
            f"the forward reads {place} at {line}, and an earlier forward left a tensor there, which no rank has kept: return "
            "it from the forward, or make it a buffer."
        )
    changes = first.found.writes.numbers
    if not changes:
        _check_flags(first, entry, export)
        return Decided(first, entry)
    for place, change in changes.items():
        if not _is_number(change.new) and not isinstance(change.new, torch.Tensor):
            _refuse(place, "", f"it becomes {type(change.new).__name__}")
        if not isinstance(place.item, int | str | None):
            _refuse(place, "", f"its key is of the type {type(place.item).__name__}")
    return _second_call(first, changes, entry, export)


def _check_flags(first: Exported, entry: EntryState, export: Export) -> None:
    """Raise `CaptureError` if the first call changes flags and the second call, with these flags, has another graph."""
    flags = {place: change.new for place, change in first.found.writes.flags.items()}
    if not flags or first.found.writes.caches:
        return
    try:
        same = alike(first, export(EntryState(flags, entry.watched)))
    except CaptureError:
        same = False
    if not same:
        raise CaptureError(
            f"the forward changes {', '.join(map(str, flags))} in its first call, and the second call computes other values: "
            "the graph would repeat the first call in every step. Run the forward once before graphpp.compile."
        )


def _second_call(first: Exported, changes: Changes, entry: EntryState, export: Export) -> Decided:
    """Trace the second call, and the third one if there are counters."""
    last = {place: change.new for place, change in changes.items() if _is_number(change.new)}
    attributes = frozenset(place for place in changes if place.item is None)
    entry = EntryState(last, entry.watched | attributes)
    second = export(entry)
    accesses, again = second.found.accesses, second.found.writes.numbers
    for place in again.keys() - changes.keys():
        _refuse(place, "", "not in the first call, but in the second")
    updates = [_update(place, change, again.get(place), accesses) for place, change in changes.items()]
    _refuse_unlike(first, second, changes, accesses.reads)
    if not any(update.effect is Effect.COUNTER for update in updates):
        return Decided(second, entry, tuple(updates))
    return Decided(*_third_call(second, entry, updates, export), tuple(updates))


def _update(place: Place, change: Change, again: Change | None, accesses: Accesses) -> NumberUpdate:
    """The kind of a change by the first call, from the change `again` by the second call and its `accesses`."""
    read = accesses.reads.get(place)
    overwritten = read is None and place in accesses.writes
    if isinstance(change.new, torch.Tensor):
        if not overwritten or again is None or not isinstance(again.new, torch.Tensor):
            _refuse(place, read, "a tensor takes the place of a number that the next call reads")
        return NumberUpdate(place, Effect.TENSOR, None)
    if again is None:
        return NumberUpdate(place, Effect.OVERWRITTEN if overwritten else Effect.LAST, change.new)
    if type(change.old) is type(change.new) is type(again.new) is int and not overwritten:
        step = change.new - change.old
        if again.new - again.old == step:
            return NumberUpdate(place, Effect.COUNTER, step)
    _refuse(place, read, f"it is {change.old}, then {change.new}, then {again.new}")


def _third_call(
    second: Exported, entry: EntryState, updates: list[NumberUpdate], export: Export
) -> tuple[Exported, EntryState]:
    """Trace without the values of the counters: the graph must be the same, and need none of the values."""
    counters = {update.place: update for update in updates if update.effect is Effect.COUNTER}
    unknown = {place: UnknownInteger() for place in counters}
    entry = replace(entry, values={**entry.values, **unknown})
    reads, names = second.found.accesses.reads, ", ".join(map(str, counters))
    line = ", ".join(filter(None, (reads.get(place) for place in unknown)))
    try:
        third = export(entry)
    except CaptureError as error:
        raise _refusal(names, line, f"a value of the step depends on it ({str(error).splitlines()[0]})") from error
    if not alike(second, third) or any(each.uses.found for each in unknown.values()):
        raise _refusal(names, line, "a value of the step depends on it")
    now = third.found.writes.numbers
    for place, counter in unknown.items():
        new = now[place].new if place in now else None
        if type(new) is not UnknownInteger or new.uses is not counter.uses or new.offset != counters[place].value:
            _refuse(place, reads.get(place), "each call changes it in another way")
    for place in now.keys() - unknown.keys():
        if not isinstance(now[place].new, torch.Tensor):
            _refuse(place, reads.get(place), f"it depends on {names}")
    return third, entry


def _refuse_unlike(first: Exported, second: Exported, changes: Changes, reads: Mapping[Place, str]) -> None:
    if not alike(first, second):
        names = ", ".join(str(place) for place in changes)
        lines = ", ".join(filter(None, reads.values()))
        raise _refusal(names, lines, "the second call computes other values than the first")


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _refuse(place: Place, read: str | None, why: str) -> NoReturn:
    raise _refusal(str(place), read, why)


def _refusal(names: str, read: str | None, why: str) -> CaptureError:
    line = f" (read at {read})" if read else ""
    return CaptureError(
        f"the number {names}{line} changes while the model runs, and {why}: the graph would use its first value in every step. "
        "Make it a tensor, and register it as a buffer."
    )
