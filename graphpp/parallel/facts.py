"""The facts that ranks compare before they go on together.

Contract: facts are lines of text under names, and checksums of tensors under names; nothing is pickled. A name, or a checksum,
that a rank does not have is not compared on that rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

_ERROR = "error"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Facts:
    """A description of the next thing that a rank does: name -> lines of text.

    `sums`: checksums of tensors that all ranks must have alike, by name; None for a tensor that this rank was not given.
    `base`: facts that are also part of the description, with a digest that is known already.
    """

    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sums: Mapping[str, int | None] = field(default_factory=dict)
    base: Facts | None = None

    @classmethod
    def of_failure(cls, error: BaseException) -> Facts:
        """The facts of a rank whose own work failed."""
        return cls({_ERROR: [f"{type(error).__name__}: {error}"]})

    def adding(self, lines: Mapping[str, Sequence[str]], sums: Mapping[str, int | None] | None = None) -> Facts:
        """The facts with more lines and checksums; under a name of both, the new ones."""
        return Facts(lines, {**self.sums, **(sums or {})}, self)

    @cached_property
    def digest(self) -> bytes:
        """A hash of all lines, 16 bytes, equal on ranks that have made equal facts in the same way."""
        below = b"" if self.base is None else self.base.digest
        return hashed(below + repr([(name, *lines) for name, lines in self.lines.items()]).encode())

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
    def all_lines(self) -> dict[str, list[str]]:
        """The lines, and a line for each checksum."""
        below = {} if self.base is None else self.base.all_lines
        sums = {f"the values of {name}": [f"checksum {total}"] for name, total in self.sums.items() if total is not None}
        return {**below, **{name: list(lines) for name, lines in self.lines.items()}, **sums}


def hashed(content: bytes) -> bytes:
    """A hash of the content, 16 bytes."""
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def failure_in(lines: Mapping[str, Sequence[str]]) -> str | None:
    """The error of a rank whose own work failed, from its lines; None if the rank did not fail."""
    return lines[_ERROR][0] if _ERROR in lines else None
