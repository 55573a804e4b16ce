"""The data of a report page, as frozen dataclasses.

Contract: plain numbers, texts and tuples, so `json.dumps(dataclasses.asdict(page))` works. Bytes are integers; times are
seconds unless the part has a unit. Texts may contain any characters. A part that is None or empty omits its section.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from graphpp.errors import GraphPPError
from graphpp.report.comparison import Unit
from graphpp.report.memory_view import MemoryView
from graphpp.report.run_view import RunView
from graphpp.report.timeline_view import TimelineView


@dataclass(frozen=True)
class StageView:
    """One stage: `parameters`: number of elements; `saved_bytes`: activations that one microbatch saves."""

    stage: int
    rank: int
    modules: tuple[str, ...] = ()
    parameters: int = 0
    parameter_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class ValueView:
    """A value that crosses a boundary for one microbatch. `maker`: the module and source line that compute it."""

    name: str
    nbytes: int
    form: str = ""
    maker: str = ""


@dataclass(frozen=True)
class BoundaryView:
    """The values between `stage` and `stage` + 1 for one microbatch: activations forward, gradients backward. `relayed_bytes`:
    the part of both that also crosses other boundaries (`RelayView`)."""

    stage: int
    forward_bytes: int
    backward_bytes: int
    relayed_bytes: int = 0
    forward: tuple[ValueView, ...] = ()
    backward: tuple[ValueView, ...] = ()


@dataclass(frozen=True)
class RelayView:
    """A value, such as a skip connection, that travels from stage `source` past the next stage to stage `target`. `unused`:
    stages that only pass it on. `way`: "forward" or "backward"."""

    value: ValueView
    source: int
    target: int
    way: str = "forward"
    unused: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes over all boundaries on the way, for one microbatch."""
        return self.value.nbytes * abs(self.target - self.source)


class Cell(NamedTuple):
    """A column's name, the value by which plans are ordered in it, and the value's text."""

    name: str
    value: float | str
    text: str


@dataclass(frozen=True)
class PlanEntry:
    """A candidate plan: `seconds` of a step, `nbytes` of the fullest rank, `reason` why it is not the best, or is
    the best and not the fastest.

    `fits`: whether it is within the cap; `on_front`: whether no other plan has both less time and fewer bytes; `yours`: whether
    it is the reader's own layout. `choices`: its columns in the table of plans, by which a reader filters and colours;
    `results`: further columns. `texts`, `numbers`: by what two plans are compared, as in `PlanComparison`. `timeline`: of its
    step (None: left out). Raises `GraphPPError` for negative or infinite seconds or bytes.
    """

    name: str
    seconds: float
    nbytes: int
    reason: str = ""
    fits: bool = True
    on_front: bool = False
    yours: bool = False
    choices: tuple[Cell, ...] = ()
    results: tuple[Cell, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    numbers: tuple[tuple[str, Unit, float], ...] = ()
    timeline: TimelineView | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.seconds < inf and 0 <= self.nbytes < inf):
            given = f"seconds={self.seconds!r} and nbytes={self.nbytes!r}"
            raise GraphPPError(f"plan {self.name!r}: take finite seconds and bytes, 0 or more, got {given}")


@dataclass(frozen=True)
class Page:
    """A report page. `asked`, `facts`: (name, text) pairs of its head: what was given, and what came of it. `notes`: sentences
    below the head. `timelines`: drawn one above the other, on one axis if their units are equal. `cap`: bytes that plans may
    take, drawn in their chart."""

    title: str = "graphpp report"
    asked: tuple[tuple[str, str], ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    timelines: tuple[TimelineView, ...] = ()
    memory: MemoryView | None = None
    stages: tuple[StageView, ...] = ()
    boundaries: tuple[BoundaryView, ...] = ()
    relays: tuple[RelayView, ...] = ()
    plans: tuple[PlanEntry, ...] = ()
    cap: int | None = None
    run: RunView = field(default_factory=RunView)
