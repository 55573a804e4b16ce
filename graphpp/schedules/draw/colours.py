"""The colour of an action in a picture.

Contract: one hue per kind of action; the stages of one rank are shades of it, the first stage the darkest.
"""

from __future__ import annotations

from graphpp.schedules.table.actions import SENDS, Action, Kind

IDLE = "#e4e6e8"
_OF_KIND = {Kind.F: "#2a6fbb", Kind.B: "#2f8f5b", Kind.I: "#c8641b", Kind.W: "#7d55a8"}
SEND, RECEIVE, COLLECTIVE = "#b3261e", "#e58a84", "#8a6d1a"
_LIGHTEST = 0.55  # share of white in the shade of a rank's last stage
_MEANINGS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient"}


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of an F, B, I or W on the stage that is number `chunk` of its rank's `chunks` stages."""
    white = _LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return _hex(*(round(value + (255 - value) * white) for value in _rgb(_OF_KIND[kind])))


def message_colour(action: Action) -> str:
    """The colour of a send, of a receive (or a batch with a receive in it), or of a collective."""
    if not action.is_communication:
        return COLLECTIVE
    return SEND if all(leaf.kind in SENDS for leaf in action.leaves) else RECEIVE


def ink_on(colour: str) -> str:
    """The colour of text on a background: black or white."""
    red, green, blue = _rgb(colour)
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#1b1f24"


def legend_text(kind: Kind) -> str:
    """The name of a kind of computation in a legend."""
    return f"{kind.value} {_MEANINGS[kind]}"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _hex(*values: int) -> str:
    return "#" + "".join(f"{value:02x}" for value in values)
