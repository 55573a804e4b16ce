"""Two plans side by side, with the differences of their seconds, shares, rates and bytes.

Contract: `PlanComparison` is data, and prints as a table; the difference of a number is that of the second plan to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class ComparedChoice:
    """What two plans chose, as text."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class ComparedNumber:
    """A number of two plans."""

    name: str
    unit: Unit
    first: float
    second: float

    @property
    def difference(self) -> float:
        """How much more the second plan has."""
        return self.second - self.first

    def texts(self) -> tuple[str, str, str, str]:
        """The name, both numbers, and the difference with its sign."""
        spell, more = _SPELL[self.unit], self.difference
        difference = f"{'+' if more > 0 else '-'}{spell(abs(more))}" if more else "equal"
        return self.name, spell(self.first), spell(self.second), difference


@dataclass(frozen=True)
class PlanComparison:
    """What two plans chose, and what that costs by their predictions."""

    choices: tuple[ComparedChoice, ...]
    numbers: tuple[ComparedNumber, ...]

    @classmethod
    def of(cls, choices: tuple[Choices, Choices], first: Numbers, second: Numbers) -> PlanComparison:
        """The comparison of two plans' choices by name, and of their numbers by name and unit.

        A number that a plan lacks is 0; one that is 0 in both plans is left out.
        """
        one, two = choices
        found = (ComparedNumber(*key, first.get(key, 0), second.get(key, 0)) for key in {**first, **second})
        return cls(
            tuple(ComparedChoice(name, one[name], two[name]) for name in one),
            tuple(each for each in found if each.first or each.second),
        )

    def document(self) -> dict[str, Any]:
        """The comparison as data for JSON."""
        numbers = [{**asdict(each), "difference": each.difference} for each in self.numbers]
        return {"choices": [asdict(each) for each in self.choices], "numbers": numbers}

    def __str__(self) -> str:
        """A table: a line for each choice and each number."""
        choices = [
            (each.name, each.first, each.second, "equal" if each.first == each.second else "differs") for each in self.choices
        ]
        heads, rows = ("", "first", "second", "difference"), [*choices, *(each.texts() for each in self.numbers)]
        return text_table(heads, rows, left=("",), wraps=heads, width=140)
