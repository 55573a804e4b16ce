"""The (stage, microbatch) pairs of a schedule whose backward recomputes forward values, as one line of its text.

A pair that has an R in the table is recomputed by this R instead, whether the line lists the pair or not.
`parse_pairs(spell_pairs(pairs)) == pairs`; a line that `is_pairs_line` accepts is no row of any table.

    recompute none
    recompute 0: 1 3; 2: 0 1 2 3        stage 0 at microbatches 1 and 3, stage 2 at four
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from graphpp.errors import ScheduleError

Pairs = frozenset[tuple[int, int]]
_KEYWORD = "recompute"


def as_pairs(pairs: object) -> Pairs:
    """Any collection of (stage, microbatch) pairs as a frozenset; raises `ScheduleError` for anything else."""
    try:
        found = frozenset((stage, microbatch) for stage, microbatch in pairs)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        found = None
    if found is None or not all(type(number) is int and number >= 0 for pair in found for number in pair):
        raise ScheduleError(f"recomputed={pairs!r}: give pairs of numbers, {{(stage, microbatch), ...}}, or None")
    return found


def is_pairs_line(text: str) -> bool:
    return text.strip().split(" ", 1)[0] == _KEYWORD


def spell_pairs(pairs: Iterable[tuple[int, int]]) -> str:
    stages: dict[int, list[int]] = defaultdict(list)
    for stage, microbatch in sorted(pairs):
        stages[stage].append(microbatch)
    each = [f"{stage}: {' '.join(map(str, microbatches))}" for stage, microbatches in stages.items()]
    return f"{_KEYWORD} {'; '.join(each) or 'none'}"


def parse_pairs(text: str) -> Pairs:
    """Read the pairs from a line. Raises `ScheduleError` for a line in any other form."""
    rest = text.strip().removeprefix(_KEYWORD).strip()
    try:
        parts = [part.split(":") for part in rest.split(";")] if rest != "none" else []
        pairs = [(_index(stage), _index(word)) for stage, words in parts for word in words.split()]
    except ValueError:
        raise ScheduleError(f"{text.strip()!r}: write {_KEYWORD} none, or {_KEYWORD} 0: 1 3; 2: 0 1 2 3") from None
    return frozenset(pairs)


def _index(word: str) -> int:
    if not word.strip().isdecimal():
        raise ValueError(word)
    return int(word)
