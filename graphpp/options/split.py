"""`split=`: the forms that say where stages start. `planner/resolve_split.py` finds the first operation of each stage."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, SupportsIndex, TypeAlias, runtime_checkable

from graphpp.arguments import shown, type_name
from graphpp.errors import SplitError


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its forward operations are `position` up to, not including, `end`."""

    fqn: str  # `layers.3`; the second call of the same module is `layers.3@1`
    position: int
    end: int

    @property
    def module(self) -> str:
        """The FQN without the number of the call."""
        return re.sub(r"@\d+$", "", self.fqn)


@runtime_checkable
class Splitter(Protocol):
    """Anything that finds the stages itself, such as `Layout`."""

    def starts(self, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
        """The first operation of each stage."""
        ...


Split: TypeAlias = SupportsIndex | Sequence[str] | Sequence[Sequence[str]] | Splitter | Literal["auto"] | None
_MOST_STAGES = 2**20


def read_split(form: Any) -> Split:
    """Check a form's type; names are resolved later. Raises `SplitError`."""
    if isinstance(form, type) or not (form is None or isinstance(form, SupportsIndex | Sequence | Splitter)):
        forms = 'FQNs, a list of FQNs per stage, a number of stages, split_points(), a Layout or "auto"'
        raise SplitError(f"take {forms}, not {type_name(form)}")
    if isinstance(form, int) and form > _MOST_STAGES:
        raise SplitError(f"take at most {_MOST_STAGES:,} stages, got {shown(form)}")
    found: Split = form
    return found


def describe_split(split: Split) -> list[str]:
    """The split as text, equal on all ranks."""
    return [repr(split) if split is None or isinstance(split, int | Sequence) else f"a {type(split).__name__}"]
