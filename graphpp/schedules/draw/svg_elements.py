"""Write SVG elements with short numbers and escaped text, scale times to pixels, and colour actions.

The output is well-formed ASCII XML without external references; style is in attributes, so that pictures can share a page. Each
kind of action has one hue; the stages of one rank are shades of it, the first the darkest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement, tostring

from graphpp.schedules.table.actions import SENDS, Action, Kind

INK, FAINT = "#24292f", "#6e7781"
_NO_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


@dataclass(frozen=True)
class Scale:
    """Time 0 is at x = `left`, `span` at `left + width`, in pixels."""

    left: float
    width: float
    span: float

    def x(self, time: float) -> float:
        return self.left + self.length(time)

    def length(self, duration: float) -> float:
        return duration / self.span * self.width if self.span else 0.0


class SvgWriter:
    def __init__(self) -> None:
        font = "system-ui, -apple-system, 'Segoe UI', 'Liberation Sans', Arial, sans-serif"
        self.root = Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": font, "role": "img"})
        self._page = self.add("rect", x=0, y=0, fill="#ffffff", class_="page")

    def add(self, tag: str, text: str = "", **attributes: object) -> Element:
        """Append an element; `stroke_width=1` is written as `stroke-width="1"`, and `class_` as `class`."""
        named = {name.rstrip("_").replace("_", "-"): _attribute_text(value) for name, value in attributes.items()}
        element = SubElement(self.root, tag, named)
        element.text = printable(text)
        return element

    def rect(self, box: tuple[float, float, float, float], fill: str, title: str = "", **attributes: object) -> None:
        """A rectangle (x, y, width, height); `title` shows on hover."""
        x, y, width, height = box
        element = self.add("rect", "", x=x, y=y, width=width, height=height, fill=fill, **attributes)
        if title:
            SubElement(element, "title").text = printable(title)

    def text(self, x: float, y: float, text: str, size: float = 11, fill: str = INK, **attributes: object) -> None:
        """A line of text, vertically centred at `y`."""
        # some viewers ignore dominant-baseline, so the baseline is computed here
        self.add("text", text, x=x, y=y + 0.36 * size, font_size=size, fill=fill, pointer_events="none", **attributes)

    def finish(self, width: float, height: float) -> str:
        """The document as text, `width` by `height` pixels."""
        for element, names in ((self._page, ("width", "height")), (self.root, ("width", "height"))):
            for name, value in zip(names, (width, height), strict=True):
                element.set(name, _attribute_text(float(value)))
        self.root.set("viewBox", f"0 0 {_attribute_text(float(width))} {_attribute_text(float(height))}")
        return str(tostring(self.root, encoding="us-ascii", xml_declaration=False), "ascii")


def printable(text: str) -> str:
    """A text with U+FFFD in place of each character that XML does not allow."""
    return _NO_XML.sub("\ufffd", text)


def text_width(text: str, size: float) -> float:
    return 0.55 * size * len(text)


def _attribute_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return printable(str(value))


IDLE = "#e4e6e8"
_OF_KIND = {Kind.F: "#2a6fbb", Kind.B: "#2f8f5b", Kind.I: "#c8641b", Kind.W: "#7d55a8", Kind.R: "#1d8a99"}
SEND, RECEIVE, COLLECTIVE = "#b3261e", "#e58a84", "#8a6d1a"
_LIGHTEST = 0.55  # fraction of white in the shade of a rank's last stage
_MEANINGS = {
    Kind.F: "forward", Kind.B: "backward", Kind.I: "input gradient", Kind.W: "weight gradient", Kind.R: "recomputation",
}  # fmt: skip


def shade(kind: Kind, chunk: int, chunks: int) -> str:
    """The colour of an F, B, I, W or R on the stage that is number `chunk` of its rank's `chunks` stages."""
    white = _LIGHTEST * chunk / (chunks - 1) if chunks > 1 else 0.0
    return "#" + "".join(f"{round(value + (255 - value) * white):02x}" for value in _rgb(_OF_KIND[kind]))


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
    return f"{kind.value} {_MEANINGS[kind]}"


def _rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
