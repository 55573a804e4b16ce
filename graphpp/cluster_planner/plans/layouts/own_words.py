"""A layout in graphpp's own words, with commas: `pp 8, tp 4, MegatronInterleaved 5, keep 1, recompute selective`.

The text of a `PlanSetting` is such a layout. It says how many microbatches of how many rows there are, so it is complete: what
it leaves out is off. In other texts, what is left out is open.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from graphpp.cluster_planner.plans.layouts.other_systems import WHOLE, Layout
from graphpp.cluster_planner.plans.mesh_shapes import SIZES
from graphpp.cluster_planner.plans.settings import PIECE
from graphpp.errors import ScheduleError
from graphpp.schedules.generate.names import ALIASES, SCHEDULES

_NAMES = {name.lower(): known for name, known in {**{each: each for each in SCHEDULES}, **ALIASES, "loop": "auto"}.items()}


def _number(text: str) -> int | float | str | None:
    return None if text in ("none", "all", "whole") else float(text) if "." in text else int(text) if text.isdecimal() else text


def _layers(text: str) -> int | tuple[int, ...]:
    counts = tuple(map(int, text.split("+")))
    return counts if len(counts) > 1 else counts[0]


def _split(names: list[str]) -> dict[str, Any]:
    return {"split": names[0] if "|" in names[0] else names}


_FORMS: Mapping[str, Callable[..., dict[str, Any]]] = {
    rf"({'|'.join(SIZES)}) (\d+)": lambda name, size: {name: int(size)},
    r"experts over (?:cp|tp|cp and tp) too": lambda: {"folded": True},
    r"(\d+) stages? (?:a|per) rank": lambda count: {"stages_per_rank": int(count)},
    r"(\d+) stages?": lambda count: {"stages": int(count)},
    r"(\d+) microbatch(?:es)?": lambda count: {"microbatches": int(count)},
    r"(\d+) microbatch(?:es)? of (\d+) rows?": lambda count, rows: {"microbatches": int(count), "rows": int(rows)},
    r"(\d+) rows?": lambda count: {"rows": int(count)},
    r"(recompute) (none|selective|full|\d*\.\d+)|(keep) (all|\d+)|(offload) (none|1|\d*\.\d+)": lambda *found: {
        name: _number(value) for name, value in zip(found[::2], found[1::2], strict=True) if name
    },
    r"recompute (selective|full) of (\d+(?:\+\d+)*) layers?": lambda kind, count: {
        "recompute": kind, "recomputed": _layers(count),
    },
    r"words (cut|whole)": lambda word: {"word_parts": word == "cut"},
    r"logits (whole)|logits in pieces(?: of (\d+))?": lambda whole, tokens: {
        "logits_tokens": None if whole else int(tokens or PIECE)
    },
    r"(\d+(?:\+\d+)+) layers": lambda counts: {"split": _layers(counts)},
    r"split (.+)": lambda names: _split(names.split()),
    r"weight gradients placed|recomputed ahead|searched": lambda: {},
}  # fmt: skip
_ORDERS = re.compile(r"weight gradients placed|recomputed ahead|searched")
_SCHEDULE = re.compile(r"([\w-]+?)(?: (\d+))?(?: in groups of (\d+))?")


def read_own_words(text: str) -> Layout:
    """The layout of a text. Raises `ScheduleError` that names a part which says nothing, or says something else again."""
    found: dict[str, Any] = {}
    for piece in re.split(r",|\s+x\s+", text):
        for name, value in _piece(piece.strip()).items():
            if found.setdefault(name, value) != value:
                raise ScheduleError(f"like: {name} stands twice, as {found[name]} and as {value}: leave one of the two out")
    if "number" in found:  # stages a rank, or the group where these are given
        found["group" if {"stages", "stages_per_rank"} & found.keys() else "stages_per_rank"] = found.pop("number")
    if {"microbatches", "rows", "stages"} <= found.keys():
        found = {**dict.fromkeys(SIZES, 1), "folded": False, "keep": None, "group": None, **WHOLE, **found}
    note = "The order of actions is not in the words: a named schedule is priced; the plan's JSON has the order."
    return Layout(found, (note,) if _ORDERS.search(text) else ())


def _piece(piece: str) -> dict[str, Any]:
    for form, read in _FORMS.items():
        if match := re.fullmatch(form, piece):
            return read(*match.groups())
    match = _SCHEDULE.fullmatch(piece)
    name = _NAMES.get(match[1].lower()) if match else None
    if match is None or name is None:
        near = "".join(f", did you mean {_NAMES[each]}?" for each in get_close_matches(piece.split(" ")[0].lower(), _NAMES, 1))
        forms = "pp 8, tp 4, dp_shard 2, MegatronInterleaved 5, 1 row, keep 1, recompute selective"
        raise ScheduleError(f"like: {piece!r} says nothing{near}: take parts as in {forms}; a file; or Megatron-LM's arguments")
    loop = {"pp": 1} if piece == "loop" else {}
    return {"schedule": name, **loop, **{key: int(match[at]) for at, key in ((2, "number"), (3, "group")) if match[at]}}
