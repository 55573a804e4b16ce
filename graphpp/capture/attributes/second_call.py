"""Trace a second call of a model whose forward changes numbers in attributes, to decide whether a graph can represent it.

Contract: a graph has the numbers of one call. The second call is traced with the numbers that the first call leaves. If it has
the same graph and leaves the same numbers, so does every later call, and the model is accepted (Swin, for instance, clamps its
window to the image size). Otherwise `CaptureError` names the numbers and the lines that change them.

Flags (bool, text, None) count as numbers, unless the first call also keeps a tensor in an attribute or buffer that was None.
The graph makes this tensor in each call, and a step changes neither the flags nor the attribute. That is right for a cache of
what is computed from sizes, buffers and frozen parameters. If the tensor depends on more, the call must not read it from the
call before: a second call in which each use of the tensor raises must have the same graph. Else `CaptureError` names it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from graphpp._torch.this_thread import replaced
from graphpp.capture.attributes.exported import Exported, alike
from graphpp.capture.attributes.numbers import NumberUpdate, Place, as_kept
from graphpp.capture.source_lines import user_line
from graphpp.errors import CaptureError, GraphPPError

Export = Callable[[Iterable[NumberUpdate]], Exported]
_PLAIN = (bool, int, float, str, type(None))


def same_in_every_call(first: Exported, export: Export) -> Exported:
    """The export to make a graph of; `found.writes.updates` has the numbers that each call leaves.

    `first`: the export of the current model. `export` exports a call that begins with other numbers. Raises `CaptureError`.
    """
    updates = first.found.writes.updates
    for place, update in updates.items():
        if type(update.value) not in _PLAIN:
            raise _refusal([place], f"it becomes {type(update.value).__name__}", export)
        if not isinstance(place.item, int | str | None):
            raise _refusal([place], f"its key is of the type {type(place.item).__name__}", export)
    found = _second_call(first, updates, export) if updates else first
    of_call = first.of_call
    if of_call:
        _refuse_state(found, of_call, export)
    return found


def _refuse_state(found: Exported, of_call: Sequence[Place], export: Export) -> None:
    """Raise `CaptureError` if a call reads the tensors `of_call` that the call before kept."""
    writes = found.found.writes
    before = writes.numbers | writes.flags | {place: as_kept(place, value) for place, value in writes.kept.items()}
    try:
        reads = not alike(found, export(before.values()))
    except GraphPPError:
        reads = True
    if reads:
        raise CaptureError(
            f"the forward keeps a tensor of one call in {', '.join(map(str, of_call[:3]))}, where there was none, and may read "
            "it in the next call: the graph would make it anew in every step. Register it as a buffer with a tensor of its "
            "shape. If only the first call makes it, run the forward once before graphpp.compile."
        )


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
    names = ", ".join(f"{place}{lines.get(place.attribute, '')}" for place in [*places][:3])
    return CaptureError(
        f"the forward changes {names}, and {why}: the graph would repeat the first call in every step. Make it a tensor, and "
        "register it as a buffer. If only the first call differs, run the forward once before graphpp.compile."
    )


def _lines_of_writes(export: Export) -> dict[str, str]:
    """By attribute name, the first user line that assigns it, from one more trace; items of containers have none."""
    lines: dict[str, str] = {}
    assign = nn.Module.__setattr__

    def note(module: nn.Module, name: str, value: Any) -> None:
        lines.setdefault(name, f" (at {user_line()})")
        assign(module, name, value)

    with contextlib.suppress(GraphPPError), replaced(nn.Module, "__setattr__", note):
        export(())
    return lines
