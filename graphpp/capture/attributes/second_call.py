"""Trace a second call of a model whose forward changes numbers in attributes: the rule under which such a model is captured.

Contract: a graph has the numbers of one call. The second call is traced on the numbers that the first call leaves. If it has
the same graph and leaves the same numbers, then so does every later call, and the model is accepted: Swin, for instance, clamps
its window to the size of the image. `CaptureError` names every other number with the line that changes it.

Flags (bool, text, None) are numbers here, except where the first call also makes a cache: a trace cannot give the second call
the cache, so these flags are neither followed nor changed by a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from graphpp._torch.this_thread import replaced
from graphpp.capture.attributes.exported import Exported, alike
from graphpp.capture.attributes.numbers import NumberUpdate, Place
from graphpp.capture.source_lines import user_line
from graphpp.errors import CaptureError, GraphPPError

Export = Callable[[Iterable[NumberUpdate]], Exported]
_PLAIN = (bool, int, float, str, type(None))


def same_in_every_call(first: Exported, export: Export) -> Exported:
    """The export of which a graph is made, with the numbers that each call leaves in `found.writes.updates`.

    `first`: the export of the model as it is. `export` exports a call that begins with other numbers. Raises `CaptureError`.
    """
    updates = first.found.writes.updates
    for place, update in updates.items():
        if type(update.value) not in _PLAIN:
            raise _refusal([place], f"it becomes {type(update.value).__name__}", export)
        if not isinstance(place.item, int | str | None):
            raise _refusal([place], f"its key is of the type {type(place.item).__name__}", export)
    return _second_call(first, updates, export) if updates else first


def _second_call(first: Exported, updates: dict[Place, NumberUpdate], export: Export) -> Exported:
    try:
        second = export(updates.values())
    except GraphPPError as error:
        reason = f"the second call cannot be traced ({str(error).partition(chr(10))[0]})"
        raise _refusal(updates, reason, export) from error
    again = second.found.writes.updates
    other = [place for place in (updates | again) if repr(updates.get(place)) != repr(again.get(place))]
    if other:
        raise _refusal(other, "the second call leaves another value than the first", export)
    if not alike(first, second):
        raise _refusal(updates, "the second call computes other values than the first", export)
    return second


def _refusal(places: Iterable[Place], why: str, export: Export) -> CaptureError:
    lines = _lines_of_writes(export)
    names = ", ".join(f"{place}{lines.get(place.attribute, '')}" for place in places)
    return CaptureError(
        f"the forward changes {names}, and {why}: the graph would repeat the first call in every step. Make it a tensor, and "
        "register it as a buffer. If only the first call differs, run the forward once before graphpp.compile."
    )


def _lines_of_writes(export: Export) -> dict[str, str]:
    """By the name of an attribute, the user's line that assigns it first, from one more trace; none for items of containers."""
    lines: dict[str, str] = {}
    assign = nn.Module.__setattr__

    def note(module: nn.Module, name: str, value: Any) -> None:
        lines.setdefault(name, f" (at {user_line()})")
        assign(module, name, value)

    with contextlib.suppress(GraphPPError), replaced(nn.Module, "__setattr__", note):
        export(())
    return lines
