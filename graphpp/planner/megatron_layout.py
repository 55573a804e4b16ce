"""Megatron-Core's pipeline layout strings: `Et*3|(tt|)*29,m|L` gives the layers of each stage.

Contract
    string  `E` embedding, `t` decoder layer, `m` multi-token-prediction (MTP) layer, `L` final norm, head and loss; `|` ends a
            stage; `x*n` and `(...)*n` repeat a letter, `|` or group. Commas are ignored. Any stage but the last may be empty
    order   one E, first; then t; then m, all in one stage; one L, last (Megatron's `validate_layer_layout`)
    module  a letter is one call of a module whose FQN matches the letter's pattern. E stands for all operations before the
            first layer, L for all operations after the last layer
    Raises `SplitError` with a caret under the fault, or with the numbers that differ.
"""

import re
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from itertools import accumulate, groupby
from typing import TypeAlias

from graphpp.arguments import COUNT, Accepted, or_none, require
from graphpp.errors import SplitError
from graphpp.options.split import ModuleCall
from graphpp.planner.layers import repeated_layers
from graphpp.planner.split_by_name import check_stages

Pattern: TypeAlias = str | Sequence[str] | None
_PATTERN = Accepted(
    "a pattern, a list of patterns, or None",
    lambda value: value is None
    or isinstance(value, str)
    or (isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)),
)

_DECODER = ("layers.{}", "model.layers.{}", "*.layers.{}", "*.h.{}", "*.blocks.{}", "*.block.{}", "*.layer.{}")
_MTP = ("*.mtp_layers.{}", "*.mtp.layers.{}", "*.mtp.{}", "*.mtp")
_NAMES = r"(?:(?!\d+\.)[^.]+\.)*"  # excludes numbers: `h.3.mlp.layers.0` is no layer of the model
_MOST = 10_000  # symbols: far above any model, far below memory limits

# A letter, a `|` or a group, with its repeat count and any commas. A group needs a count.
_ITEM = re.compile(
    r"(?:(?P<one>[EtmL|])|\((?P<group>[^()]*[^(),][^()]*)\)(?=,*\*,*[0-9]))(?:,*\*,*(?P<times>[0-9][0-9,]*))?"
)

# Checked in this order on the expanded layout; the group marks the faulty symbol.
_RULES = (
    (r"\|*([^E|]|$)", "the first letter is E, the embedding"),
    (r"\|*E[^E]*(E)", "there is only one E"),
    (r"[^m]*m[^t]*(t)", "decoder layers t run before the MTP layers m"),
    (r"[^m]*m+\|+(m)", "all MTP layers m are in the same stage"),
    (r"[^L]*L\|*([^|])", "nothing stands behind L, the loss"),
    (r"[^L]*($)", "the last letter is L, the loss"),
    (r".*(\|)$", "the last stage cannot be empty: the loss is computed there"),
)

_HINTS = {
    "(": "write a group as (...)*n: closed, repeated, not empty and without a group in it",
    ")": "this closes no group",
    "*": "a letter or a group stands before *, and a number behind it",
    " ": "no space may stand in a layout; commas may",
    **dict.fromkeys("0123456789", "a number stands only behind *"),
}


@dataclass(frozen=True)
class Layout:
    """A split in Megatron's notation, for `split=`. `str()` gives a table of each rank's stages.

    A pattern is an FQN in which `{}` stands for a number, `*` for any text within a name, and `*.` for any names (or none)
    without a number. Of a list, only the first pattern that matches any call is used. Every call of a shared module counts.
    By default, `decoder` matches the names of torchtitan's and Hugging Face's models, else the repeated layers under any name;
    `mtp` matches `mtp_layers.{}` and similar names. `embedding` and `loss` are optional: the embedding must run before the
    first layer, and L starts at the first `loss` module after the last layer. `ranks`: pipeline ranks of the table (None: one
    per stage); stage `v * ranks + r` is the v-th of rank r. Raises `SplitError` for an invalid string.
    """

    text: str
    _: KW_ONLY
    embedding: Pattern = None
    decoder: Pattern = None
    mtp: Pattern = None
    loss: Pattern = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise SplitError(f"a layout is a string like 'Et*3|(tt|)*29,m|L', not {type(self.text).__name__}")
        require(SplitError, "ranks", or_none(COUNT), self.ranks)
        for name in ("embedding", "decoder", "mtp", "loss"):
            require(SplitError, name, _PATTERN, getattr(self, name))
        self._chunks(self.num_stages if self.ranks is None else self.ranks)  # also parses the string

    def __str__(self) -> str:
        return self.table()

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The letters of each stage without repeat counts: `("Ettt", "tt", "", "L")`."""
        return tuple(_parse(self.text).split("|"))

    @property
    def num_stages(self) -> int:
        """The number of stages on all ranks, including empty ones."""
        return len(self.stages)

    def table(self, ranks: int | None = None) -> str:
        """The letters of each stage: a row per rank, a column per stage on the rank; ranks with equal rows share one row."""
        ranks = next(number for number in (ranks, self.ranks, self.num_stages) if number is not None)
        chunks = self._chunks(ranks)
        held = [[_short(self.stages[chunk * ranks + rank]) for chunk in range(chunks)] for rank in range(ranks)]
        rows = [["PP rank", *(f"VPP {chunk}" for chunk in range(chunks))]]
        for cells, group in groupby(range(ranks), key=held.__getitem__):
            first, *rest = group
            rows.append([f"{first}-{rest[-1]}" if rest else f"{first}", *cells])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    def starts(self, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
        """The first operation of each stage (see `graphpp.planner.resolve_split`); `calls` in execution order. Raises
        `SplitError` if the model's layers do not match the letters."""
        places = self._places(calls)
        ahead = [0, *accumulate(map(len, self.stages))]  # letters before each stage
        starts = tuple(places[seen] for seen in ahead[:-1])
        asked = {stage for stage, letters in enumerate(self.stages) if not letters}
        check_stages(starts, [repr(letters) for letters in self.stages], asked)
        return starts

    def _chunks(self, ranks: int) -> int:
        """The number of stages per rank."""
        if ranks < 1 or self.num_stages % ranks:
            raise SplitError(f"the {self.num_stages} stages of {self.text!r} do not divide among {ranks} ranks")
        return self.num_stages // ranks

    def _places(self, calls: Sequence[ModuleCall]) -> list[int]:
        mtp = _fitting(_MTP if self.mtp is None else self.mtp, calls)
        rest = [call for call in calls if not any(layer.position <= call.position < layer.end for layer in mtp)]
        decoder = _fitting(_DECODER if self.decoder is None else self.decoder, rest)
        if not decoder and self.decoder is None:
            decoder = repeated_layers(rest)
        self._check_count("decoder", decoder)
        self._check_count("mtp", mtp)
        if decoder and mtp and mtp[0].position < decoder[-1].end:
            raise SplitError(f"out of execution order: {mtp[0].fqn}, an MTP layer, runs before {decoder[-1].fqn} ends")
        layers = [*decoder, *mtp]
        self._check_embedding(layers, calls)
        return [0, *(layer.position for layer in layers), self._loss(layers, calls)]

    def _check_count(self, keyword: str, found: Sequence[ModuleCall]) -> None:
        letter = {"decoder": "t", "mtp": "m"}[keyword]
        wanted = "".join(self.stages).count(letter)
        if wanted != len(found):
            names = f" ({found[0].fqn} to {found[-1].fqn})" if found else ""
            raise SplitError(
                f"the layout has {wanted} {letter!r}, but the model runs {len(found)} {keyword} layers{names}. "
                f"Change the layout, or say which modules they are: {keyword}='<FQN with {{}} for the number>'"
            )

    def _check_embedding(self, layers: Sequence[ModuleCall], calls: Sequence[ModuleCall]) -> None:
        first = layers[0].position if layers else sys.maxsize
        if self.embedding is not None and not any(call.end <= first for call in _fitting(self.embedding, calls)):
            raise SplitError(f"embedding={self.embedding!r} fits no module that runs before the first layer")

    def _loss(self, layers: Sequence[ModuleCall], calls: Sequence[ModuleCall]) -> int:
        end = layers[-1].end if layers else 0
        if self.loss is None:
            return end
        behind = _fitting(self.loss, [call for call in calls if call.position >= end])
        if not behind:
            raise SplitError(f"loss={self.loss!r} fits no module that runs after the last layer")
        return behind[0].position


def _fitting(patterns: str | Sequence[str], calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls, none inside another, that the first matching pattern matches."""
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        text = re.escape(pattern).replace(r"\{\}", r"\d+").replace(r"\*\.", _NAMES).replace(r"\*", "[^.]*")
        fits = re.compile(text).fullmatch
        found: list[ModuleCall] = []
        for call in calls:
            if (fits(call.module) or fits(call.fqn)) and (not found or call.position >= found[-1].end):
                found.append(call)
        if found:
            return found
    return []


def _short(letters: str) -> str:
    """A stage's letters with repeat counts: `Ettt`, `t*12L`."""
    runs = [(letter, len([*run])) for letter, run in groupby(letters)]
    return "".join(f"{letter}*{count}" if count > 3 else letter * count for letter, count in runs) or "(empty)"


# ------------------------------------------------------------------------------------------------------- the string


def _parse(text: str) -> str:
    """The letters and `|` of a layout string with repeats expanded; `SplitError` with a caret under a fault."""
    symbols = _expand(text, 0, len(text))
    code = "".join(symbol for symbol, _ in symbols)
    for rule, why in _RULES:
        if fault := re.match(rule, code):
            raise _fault(text, [*(at for _, at in symbols), len(text)][fault.start(1)], why)
    return code


def _expand(text: str, at: int, end: int) -> list[tuple[str, int]]:
    """The symbols of `text[at:end]` with repeats expanded, each with its index in the text."""
    symbols: list[tuple[str, int]] = []
    while at < end:
        if text[at] == ",":
            at += 1
            continue
        item = _ITEM.match(text, at, end)
        if item is None:
            raise _fault(text, at, _HINTS.get(text[at], "the letters are E, t, m, L and | ( ) * with a number"))
        piece = _expand(text, *item.span("group")) if item["group"] else [(text[at], at)]
        times = (item["times"] or "1").replace(",", "").lstrip("0")
        count = int(times[: len(str(_MOST)) + 1] or 0)
        if len(symbols) + len(piece) * count > _MOST:
            raise _fault(text, at, f"this makes more than {_MOST} layers and stages")
        symbols += piece * count
        at = item.end()
    return symbols


def _fault(text: str, at: int, why: str) -> SplitError:
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return SplitError(f"the layout is not legal at character {at + 1}: {why}\n  {shown}\n  {' ' * at}^")
