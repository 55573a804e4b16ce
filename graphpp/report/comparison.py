"""Two plans side by side, with the differences (second minus first) of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from graphpp.report.text_table import text_table
from graphpp.units import spell_bytes, spell_time

Unit = Literal["seconds", "bytes", "share", "per second"]
Choices = Mapping[str, str]
Numbers = Mapping[tuple[str, Unit], float]
_SPELL: Mapping[Unit, Callable[[float], str]] = {
    "seconds": lambda value: spell_time(value, "s"),
    "bytes": lambda value: spell_bytes(round(value)),
    "share": lambda value: f"{value:.2%}",
    "per second": lambda value: f"{value:,.0f}",
}


def is_part(name: str) -> bool:
    """Whether a number is one part of a plan's seconds or bytes, neither their total nor what a rank sends."""
    return name not in ("step", "memory at the most") and not name.startswith("sent ")


@dataclass(frozen=True)
class PlanComparison:
    """The choices of two plans by name, and their predictions by name and unit; a number that a plan lacks is 0."""

    choices: tuple[Choices, Choices]
    numbers: tuple[Numbers, Numbers]

    def document(self) -> dict[str, Any]:
        """The comparison as data for JSON, without numbers that are 0 in both plans."""
        one, two = self.choices
        choices = [{"name": name, "first": one[name], "second": two[name]} for name in one]
        first, second = self.numbers
        pairs = {key: (first.get(key, 0), second.get(key, 0)) for key in {**first, **second}}
        numbers = [
            {"name": name, "unit": unit, "first": low, "second": high, "difference": high - low}
            for (name, unit), (low, high) in pairs.items()
            if low or high
        ]
        return {"choices": choices, "numbers": numbers}

    def line(self) -> str:
        """The second plan in one line: its step and peak bytes, and the differences of their parts, the largest first."""
        found = {(each["name"], each["unit"]): each for each in self.document()["numbers"]}
        step, peak = found["step", "seconds"], found["memory at the most", "bytes"]
        share = step["second"] / step["first"] - 1

        def parts(unit: Unit) -> str:
            inside = (one for (name, of), one in found.items() if of == unit and is_part(name))
            ordered = sorted((one for one in inside if one["difference"]), key=lambda one: -abs(one["difference"]))
            return ", ".join(f"{one['name']} {_signed(one)}" for one in ordered) or "equal in all parts"

        return (
            f"step {_SPELL['seconds'](step['second'])}, {share:+.1%} ({parts('seconds')}); "
            f"memory {_SPELL['bytes'](peak['second'])}, {_signed(peak)} ({parts('bytes')})"
        )

    def __str__(self) -> str:
        found, heads = self.document(), ("", "first", "second", "difference")
        rows = [(*each.values(), "equal" if each["first"] == each["second"] else "differs") for each in found["choices"]]
        for each in found["numbers"]:
            spell = _SPELL[each["unit"]]
            rows.append((each["name"], spell(each["first"]), spell(each["second"]), _signed(each)))
        return text_table(heads, rows, left=("",), wraps=heads, width=140)


def _signed(number: Mapping[str, Any]) -> str:
    """The difference of a number with its sign."""
    more = number["difference"]
    return f"{'+' if more > 0 else '-'}{_SPELL[number['unit']](abs(more))}" if more else "equal"
