"""A layout in graphpp's own words, with commas: `pp 8, tp 4, MegatronInterleaved 5, keep 1, recompute selective`.

The text of a `PlanSetting` is such a layout. It says how many microbatches of how many rows there are, so it is complete: what
it leaves out is off. In other texts, what is left out is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from graphpp.cluster_planner.plans.layouts.layout import WHOLE, Layout
from graphpp.cluster_planner.plans.mesh_shapes import SIZES
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import ALIASES, SCHEDULES

_NAMES = {name.lower(): known for name, known in {**{each: each for each in SCHEDULES}, **ALIASES, "loop": "auto"}.items()}
_TOKENS = 256  # whose logits exist at one time, as in plans of the search


def _number(text: str | None) -> int | float | None:
    return None if text in (None, "none", "all") else float(text) if "." in text else int(text)


def _layers(text: str) -> int | tuple[int, ...]:
    counts = tuple(map(int, text.split("+")))
    return counts if len(counts) > 1 else counts[0]


def _pieces(found: re.Match[str]) -> dict[str, Any]:
    return {"logits_tokens": None if found[1] == "whole" else int(found[2] or _TOKENS)}


def _split(found: re.Match[str]) -> dict[str, Any]:
    names = found[1].split()
    return {"split": names[0] if len(names) == 1 and re.search(r"[|]", names[0]) else names}


_FORMS: Mapping[str, Callable[[re.Match[str]], dict[str, Any]]] = {
    rf"({'|'.join(SIZES)})[ =](\d+)": lambda found: {found[1]: int(found[2])},
    r"(\d+) stages? (?:a|per) rank": lambda found: {"stages_per_rank": int(found[1])},
    r"(\d+) stages?": lambda found: {"stages": int(found[1])},
    r"(\d+) microbatch(?:es)?": lambda found: {"microbatches": int(found[1])},
    r"(\d+) microbatch(?:es)? of (\d+) rows?": lambda found: {"microbatches": int(found[1]), "rows": int(found[2])},
    r"(\d+) rows?": lambda found: {"rows": int(found[1])},
    r"keep (all|\d+)": lambda found: {"keep": _number(found[1])},
    r"recompute (none)": lambda found: {"recompute": None},
    r"recompute (selective|full)": lambda found: {"recompute": found[1]},
    r"recompute (\d*\.\d+)": lambda found: {"recompute": float(found[1])},
    r"recompute (selective|full) of (\d+(?:\+\d+)*) layers?": lambda found: {
        "recompute": found[1], "recomputed": _layers(found[2]),
    },
    r"offload (none|1|\d*\.\d+)": lambda found: {"offload": _number(found[1])},
    r"words (cut|whole)": lambda found: {"word_parts": found[1] == "cut"},
    r"logits (whole|in pieces(?: of (\d+))?)": _pieces,
    r"(\d+(?:\+\d+)+) layers": lambda found: {"split": _layers(found[1])},
    r"split (.+)": _split,
    "weight gradients placed": lambda found: {"refine": "placed"},
    "searched": lambda found: {"refine": "searched"},
}  # fmt: skip
_SCHEDULE = re.compile(r"([\w-]+?)(?: (\d+))?(?: in groups of (\d+))?")


def read_own_words(text: str) -> Layout:
    """The layout of a text. Raises `ScheduleError` that names a part which says nothing, or says something else again."""
    found: dict[str, Any] = {}
    pieces = [each.strip() for each in re.split(r",|\s+x\s+", text)]
    for piece in pieces:
        for name, value in _piece(piece).items():
            if found.setdefault(name, value) != value:
                raise ScheduleError(f"like: {name} stands twice, as {found[name]} and as {value}: leave one of the two out")
    if "number" in found:  # stages a rank, or the group where these are given
        found["group" if {"stages", "stages_per_rank"} & found.keys() else "stages_per_rank"] = found.pop("number")
    if {"microbatches", "rows"} <= found.keys() and "stages" in found:
        found = {**dict.fromkeys(SIZES, 1), "keep": None, "group": None, **WHOLE, **found}
    return Layout(found)


def _piece(piece: str) -> dict[str, Any]:
    for form, read in _FORMS.items():
        if match := re.fullmatch(form, piece):
            return read(match)
    match = _SCHEDULE.fullmatch(piece)
    name = _NAMES.get(match[1].lower()) if match else None
    if match is None or name is None:
        near = "".join(f", did you mean {_NAMES[each]}?" for each in get_close_matches(piece.split(" ")[0].lower(), _NAMES, 1))
        forms = "pp 8, tp 4, dp_shard 2, MegatronInterleaved 5, 1 row, keep 1, recompute selective"
        raise ScheduleError(f"like: {piece!r} says nothing{near}: take parts as in {forms}; a file; or Megatron-LM's arguments")
    given = {"number": match[2], "group": match[3]}
    return {"schedule": name, **{each: int(number) for each, number in given.items() if number is not None}}
