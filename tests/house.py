"""The imports of `graphpp/`, measured on the source text: files per folder, floors, upward arrows, circles.

`python -m tests.house [ROOT]` prints the table for a checkout. `tests/test_floors.py` holds the checkout to it.
Imports inside functions and under `TYPE_CHECKING` count: each of them is an arrow between two ideas.
"""

from __future__ import annotations

from collections.abc import Mapping

ANY = ("graphpp",)
FACE = "graphpp/schedules/__init__"

# package -> the packages that its files may import besides its own, errors and units. The order is that of the floors.
MAY_IMPORT: Mapping[str, tuple[str, ...]] = {
    "graphpp._torch": (),
    "graphpp.schedules.table": (),
    "graphpp.schedules.check": ("graphpp.schedules.table",),
    "graphpp.schedules.rewrite": ("graphpp.schedules.table", "graphpp.schedules.check"),
    "graphpp.schedules.simulate": ("graphpp.schedules.table", "graphpp.schedules.check", "graphpp.schedules.rewrite"),
}
