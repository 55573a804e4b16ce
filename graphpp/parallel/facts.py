"""The facts that ranks compare before they go on together.

Contract: facts are lines of text under names, and checksums of tensors under names; nothing is pickled. A name, or a checksum,
that a rank does not have is not compared on that rank.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

_ERROR = "error"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Facts:
    """A description of the next thing that a rank does: name -> lines of text.

    `sums`: checksums of tensors that all ranks must have alike, by name; None for a tensor that this rank was not given.
    """

    lines: Mapping[str, Sequence[str]]
    sums: Mapping[str, int | None] = field(default_factory=dict)

    @classmethod
    def of_failure(cls, error: BaseException) -> Facts:
        """The facts of a rank whose own work failed."""
        return cls({_ERROR: [f"{type(error).__name__}: {error}"]})

    @property
    def failed(self) -> bool:
        """Whether these are the facts of a rank whose own work failed."""
        return _ERROR in self.lines

    def adding(self, lines: Mapping[str, Sequence[str]]) -> Facts:
        """The facts with more lines under other names; the text and the digest of the facts so far are reused."""
        return _More(self.lines, self.sums, base=self, more=Facts(lines))

    def joined(self, other: Facts) -> Facts:
        """The lines and checksums of both; under a name of both, the lines of `other`."""
        return Facts({**json.loads(self.text), **json.loads(other.text)}, {**self.sums, **other.sums})

    def with_sums(self, sums: Mapping[str, int | None]) -> Facts:
        """The same lines, with other checksums."""
        return replace(self, sums=sums)

    @cached_property
    def text(self) -> str:
        """The lines as JSON."""
        return json.dumps({name: list(lines) for name, lines in self.lines.items()})

    @cached_property
    def digest(self) -> bytes:
        """A hash of the text, 16 bytes: equal if the texts are equal."""
        return hashed(self.text.encode())

    @property
    def lacking(self) -> bool:
        """Whether this rank was not given one of the tensors."""
        return None in self.sums.values()

    @property
    def sum(self) -> int | None:
        """A checksum of all tensors, as a signed integer of 64 bits; None without a tensor, and if one is lacking."""
        if not self.sums or self.lacking:
            return None
        return int.from_bytes(hashed(repr(sorted(self.sums.items())).encode())[:8], signed=True)

    @property
    def all_lines(self) -> Any:
        """The lines, and a line for each checksum."""
        sums = {f"the values of {name}": [f"checksum {total}"] for name, total in self.sums.items() if total is not None}
        return json.loads(self.text) | sums


@dataclass(frozen=True, kw_only=True)
class _More(Facts):
    """Facts with more facts added."""

    base: Facts
    more: Facts

    @cached_property
    def text(self) -> str:
        """All facts as JSON."""
        return json.dumps({**json.loads(self.base.text), **json.loads(self.more.text)})

    @cached_property
    def digest(self) -> bytes:
        """A hash of the base's digest and the added text, 16 bytes."""
        added = {name: list(lines) for name, lines in self.more.lines.items()}
        return hashed(self.base.digest + repr(added).encode())  # made in less time than JSON


def hashed(content: bytes) -> bytes:
    """A hash of the content, 16 bytes."""
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def failure_in(lines: Mapping[str, Sequence[str]]) -> str | None:
    """The error of a rank whose own work failed, from its lines; None if the rank did not fail."""
    return lines[_ERROR][0] if _ERROR in lines else None
