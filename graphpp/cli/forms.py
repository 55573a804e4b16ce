"""Convert command-line text to the forms that `graphpp.compile` and `graphpp.verify` take.

A `GraphPPError` begins with the option. Whether a form fits the model is checked later, by `graphpp.options` and the planner.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from graphpp.errors import GraphPPError, SplitError

if TYPE_CHECKING:  # these modules load torch, which help pages do not need
    from graphpp.options.memory import Memory
    from graphpp.options.split import Split

_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)}
_BYTES = re.compile(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([a-zA-Z]*)\s*")
_NUMBER = re.compile(r"[0-9]{1,18}")
_MOST = 2**62

SPLIT_HELP = (
    "Where stages start: a number of stages, auto, names of modules (layers.2,layers.4), the names of each stage "
    "(embed,layers.0;layers.1,head), or a layout of Megatron-Core (Et*2|t*2L)."
)
MEMORY_HELP = "What is recomputed for the backward: full, selective, a fraction of the saved bytes (0.5), or names of modules."


def read_split(text: str | None) -> Split:
    """`--split`: a number, `auto`, a layout (with `|`), the names of each stage (with `;`), or names at which stages start."""
    if text is None or text == "auto":
        return text
    if _NUMBER.fullmatch(text):
        return int(text)
    if "|" in text:
        from graphpp.planner.megatron_layout import Layout

        return Layout(text)
    if ";" in text:
        return [_names("--split", each) for each in text.split(";")]
    return _names("--split", text)


def read_memory(recompute: str | None, cap: str | None) -> Memory:
    from graphpp.options.memory import Memory

    return Memory(recompute=_recompute(recompute), cap=None if cap is None else read_bytes("--cap", cap))


def read_bytes(option: str, text: str) -> int:
    """A number of bytes, with or without a unit: `100000`, `512 MiB`, `1.5GB`."""
    found = _BYTES.fullmatch(text)
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        raise GraphPPError(f"{option}: take a number of bytes such as 100000, 512MiB or 8GB, got {text!r}")
    whole, _, fraction = found[1].partition(".")
    count: int = int(whole) * unit + int(fraction or 0) * unit // 10 ** len(fraction)
    if count > _MOST:
        raise GraphPPError(f"{option}: take at most 2**62 bytes, got {text!r}")
    return count


def _recompute(text: str | None) -> str | float | list[str] | None:
    if text is None or text in ("full", "selective"):
        return text
    try:
        return float(text)
    except ValueError:
        return _names("--memory", text)


def _names(option: str, text: str) -> list[str]:
    names = [each.strip() for each in text.split(",")]
    if not all(names):
        raise SplitError(f"{option}: one of the names between commas is empty: {text!r}")
    return names
