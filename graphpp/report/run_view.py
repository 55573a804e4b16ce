"""The steps of a run so far: losses and seconds as plain numbers.

Contract: a long run keeps every n-th step (`every`), at most `_MOST`. Losses may be nan or infinite: the chart has a gap there,
and the table names them. Raises `GraphPPError` for values that are not numbers, and for negative seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from graphpp.arguments import shown
from graphpp.errors import GraphPPError

_MOST = 20_000
_LONGEST = 2**22  # steps of a run


@dataclass(frozen=True)
class Curve:
    """Numbers of the steps `every`, 2 `every`, .. of a run."""

    values: tuple[float, ...] = ()
    every: int = 1


@dataclass(frozen=True)
class RunView:
    """`losses`, `seconds`: of steps, nan if unknown; `note`: a sentence about them."""

    losses: Curve = Curve()
    seconds: Curve = Curve()
    note: str = ""

    @classmethod
    def of(cls, losses: Sequence[float] = (), seconds: Sequence[float] = (), every: int = 1, note: str = "") -> RunView:
        """`every`: steps between neighbouring numbers."""
        times = _numbers("seconds", seconds)
        negative = next((each for each in times if each < 0), None)
        if negative is not None:
            raise GraphPPError(f"seconds: a step takes 0 seconds or more, got {negative}")
        return cls(_thinned(_numbers("losses", losses), every), _thinned(times, every), note)

    def __bool__(self) -> bool:
        return bool(self.losses.values or self.seconds.values)


def _thinned(values: Sequence[float], every: int) -> Curve:
    stride = -(-len(values) // _MOST) or 1
    return Curve(tuple(values[stride - 1 :: stride]), every * stride)


def _numbers(name: str, values: Iterable[object]) -> list[float]:
    if isinstance(values, str | bytes):
        raise GraphPPError(f"{name}: take a list of numbers, one for each step, got {shown(values)}")
    try:
        found = [float(each) for each in islice(values, _LONGEST + 1)]  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise GraphPPError(f"{name}: take a list of numbers, one for each step, got {shown(values)}") from None
    if len(found) > _LONGEST:
        raise GraphPPError(f"{name}: take the numbers of at most {_LONGEST} steps, got {shown(values)}")
    return found
