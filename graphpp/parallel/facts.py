"""The facts that ranks compare before they go on together: named lines of text and named checksums of tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

_ERROR = "error"
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class Facts:
    """The lines by name that describe a rank's next work.

    `sums`: checksums of tensors that must be equal on all ranks, by name; None for a tensor that this rank was not given. A
    rank that lacks a tensor takes no part in the comparison of `sums`. `base`: further facts, whose digest is cached.
    """

    lines: Mapping[str, Sequence[str]] = field(default_factory=dict)
    sums: Mapping[str, int | None] = field(default_factory=dict)
    base: Facts | None = None

    @classmethod
    def of_failure(cls, error: BaseException) -> Facts:
        return cls({_ERROR: [f"{type(error).__name__}: {error}"]})

    def adding(self, lines: Mapping[str, Sequence[str]], sums: Mapping[str, int | None] | None = None) -> Facts:
        return Facts(lines, {**self.sums, **(sums or {})}, self)

    @cached_property
    def digest(self) -> bytes:
        """A 16-byte hash of all lines, equal on ranks that built equal facts by the same `adding` calls."""
        below = b"" if self.base is None else self.base.digest
        return hashed(below + repr([(name, *lines) for name, lines in self.lines.items()]).encode())

    @property
    def lacking(self) -> bool:
        return None in self.sums.values()

    @property
    def sum(self) -> int | None:
        """A checksum of all tensors, as a signed 64-bit integer; None without a tensor, or if one is lacking."""
        if not self.sums or self.lacking:
            return None
        return int.from_bytes(hashed(repr(sorted(self.sums.items())).encode())[:8], signed=True)

    @property
    def all_lines(self) -> dict[str, list[str]]:
        below = {} if self.base is None else self.base.all_lines
        sums = {f"the values of {name}": [f"checksum {total}"] for name, total in self.sums.items() if total is not None}
        return {**below, **{name: list(lines) for name, lines in self.lines.items()}, **sums}


def hashed(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()[:_DIGEST_BYTES]


def failure_in(lines: Mapping[str, Sequence[str]]) -> str | None:
    """The error in the lines of a rank whose own work failed; None if the rank did not fail."""
    return lines[_ERROR][0] if _ERROR in lines else None
