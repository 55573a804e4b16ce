"""Columns of numbers, packed for a page: all in one block of bytes, compressed, as base64 text.

Contract: `add` returns the place of a column, `{"type", "at", "count"}`, which the page's script reads back as a typed array
(little-endian, `at` in bytes, a multiple of 8). `text()` has only letters that need no escape in HTML. Equal columns give equal
text.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence

_SIZES = {"u1": 1, "u2": 2, "i4": 4, "f4": 4, "f8": 8}
_ALIGNED = 8

Place = dict[str, str | int]


class Columns:
    """The columns of one page."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._length = 0

    def add(self, type_: str, values: Sequence[float]) -> Place:
        """The place of a column of this type: u1, u2, i4, f4 or f8. Raises `OverflowError` for integers that do not fit it."""
        import numpy  # loaded by the first page

        data = numpy.array(values, dtype=f"<{type_}").tobytes()
        place: Place = {"type": type_, "at": self._length, "count": len(data) // _SIZES[type_]}
        padded = data + bytes(-len(data) % _ALIGNED)
        self._pieces.append(padded)
        self._length += len(padded)
        return place

    def text(self) -> str:
        """All columns."""
        packed = gzip.compress(b"".join(self._pieces), compresslevel=6, mtime=0)
        return base64.b64encode(packed).decode("ascii")
