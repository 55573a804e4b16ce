"""Spell bytes and times with a readable unit, and place the ticks of an axis."""

from __future__ import annotations

import math


def spell_bytes(count: int) -> str:
    """Bytes as text with the largest unit that fits, for example `12.5 KiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def scale_of(span: float, unit: str) -> tuple[float, str]:
    """(factor, name) of the unit in which to show times up to `span`: one `unit` is `factor` of the unit called `name`."""
    if unit != "s" or span >= 1:
        return 1.0, unit
    return (1e3, "ms") if span >= 1e-3 else (1e6, "µs")


def spell_time(time: float, unit: str) -> str:
    """A time as text with four digits, for example `1.25 ms`; a unit other than seconds is kept."""
    factor, name = scale_of(abs(time), unit)
    return f"{time * factor:.4g} {name}"


def tick_step(span: float, most: int) -> float:
    """The distance between at most `most` ticks from 0 to `span`: 1, 2 or 5 times a power of ten."""
    if span <= 0:
        return 1.0
    rough = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10, 20) if step * power >= rough)


def ticks(span: float, most: int) -> list[float]:
    """The positions of the ticks from 0 to `span`, `tick_step(span, most)` apart."""
    step = tick_step(span, most)
    return [step * number for number in range(int(span / step + 1e-9) + 1)]
