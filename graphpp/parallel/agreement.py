"""Agreement among ranks: all ranks of a group go on together, or all raise.

Ranks compare what they are about to do when a pipeline is made, at the start of each step, and when a step is compiled: ranks
that run different messages or collectives would hang.

Contract
--------
- The ranks of one or several groups enter a `Round` and leave it together, or all raise: a rank whose own work failed in the
  body raises its own error, every other rank raises `MismatchError`, which names the rank that differs and the difference.
- If all ranks agree, they exchange one all-reduce: a digest of their facts, a checksum of the tensors that they were given, and
  the complements of both. Where these differ, one rank of each kind sends its text, of the kinds that failed and then of the
  most frequent ones, at most `_KINDS`.
- The exchange runs on the CPU if the group has a CPU backend, so that no step waits for a GPU.
"""

from __future__ import annotations

import json
import secrets
import struct
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from graphpp._torch.distributed import group_named
from graphpp.errors import MismatchError
from graphpp.parallel.facts import Facts, failure_in, hashed
from graphpp.parallel.groups import has_gloo
from graphpp.parallel.transport import transport_of

Lines = Mapping[str, Sequence[str]]  # the text of facts by name

_MADE = b"\0"  # stands before bytes that the first rank has made; an error's text stands without
_LONG = 240  # characters of a line that an error shows
_SHOWN = 3  # names of facts that an error shows
_KINDS = 16  # texts that are exchanged where ranks differ
_LEAST = -(2**63)  # of an integer of 64 bits


class Agreement:
    """Compares facts over the ranks of one group; a single process agrees with itself."""

    def __init__(
        self, group: dist.ProcessGroup | None, device: torch.device, described: Callable[[int], str] = "rank {}".format
    ) -> None:
        """`device`: of the rank's tensors. `described`: a rank of the world in an error."""
        self._described = described
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self.device = torch.device("cpu") if self._group is None or has_gloo(self._group) else device

    @property
    def ranks(self) -> int:
        """The number of ranks of the group."""
        return 1 if self._group is None else dist.get_world_size(self._group)

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return 0 if self._group is None else dist.get_rank(self._group)

    @property
    def several(self) -> bool:
        """Whether the group has more than one rank."""
        return self._group is not None

    def compare(self, facts: Facts) -> bool:
        """Whether a rank lacks a tensor of its facts' checksums. Raises `MismatchError` on every rank if the facts differ."""
        if self._group is None:
            return facts.lacking
        digest = struct.unpack("<2q", facts.digest)
        total, flags = facts.sum, [int(facts.lacking)]
        words = [*digest, _LEAST if total is None else total]
        complements = [*(~word for word in digest), _LEAST if total is None else ~total]
        found = self.largest([*words, *complements, *flags])
        most, least, lacking = found[:3], found[3:6], found[6]
        same = [high == ~low for high, low in zip(most, least, strict=True)]  # the complement of the least value is largest
        same[2] |= most[2] == least[2] == _LEAST
        if not all(same):
            kinds = self._of_each_kind(facts)
            refuse_differences(kinds)
            _refuse_other_calls(kinds)
        return bool(lacking)

    def same(self, content: bytes) -> bool:
        """Whether all ranks of the group have these bytes. Called by all ranks."""
        words = struct.unpack("<2q", hashed(content))
        found = self.largest([*words, *(~word for word in words)])
        return all(high == ~low for high, low in zip(found[: len(words)], found[len(words) :], strict=True))

    def largest(self, mine: Sequence[int]) -> list[int]:
        """The largest value of each number over all ranks; `mine`: integers of 64 bits, as many on all ranks."""
        if self._group is None:
            return list(mine)
        return transport_of(self._group, self.device).largest(mine)

    def name_of(self, rank: int) -> str:
        """A rank of the group in an error."""
        return self._described(rank if self._group is None else dist.get_global_rank(self._group, rank))

    def message(self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        """A send or receive for `batch_isend_irecv`; `peer`: a rank of the group."""
        return dist.P2POp(operation, tensor.to(self.device), group=self._group, group_peer=peer)

    def of_all(self, mine: torch.Tensor) -> torch.Tensor:
        """The small tensors of all ranks, of one shape, in order of rank, [ranks, ..] on the CPU."""
        if self._group is None:
            return mine[None]
        sent = mine.to(self.device)
        received = [torch.empty_like(sent) for _ in range(self.ranks)]
        dist.all_gather(received, sent, group=self._group)
        return torch.stack(received).cpu()

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """The result of `make` on the first rank, which alone calls it, on every rank. Called by all ranks.

        Raises the error of `make` on the first rank, and `MismatchError` with its text on the others.
        """
        if self._group is None:
            return make()
        failure, content = None, b""
        if self.rank == 0:
            try:
                content = _MADE + make()
            except Exception as error:
                failure, content = error, f"{type(error).__name__}: {error}".encode()
        content = self._broadcast(content)
        if failure is not None:
            raise failure
        if not content.startswith(_MADE):
            raise _others_failed({self.name_of(0): content.decode()})
        return content.removeprefix(_MADE)

    def _broadcast(self, content: bytes, source: int = 0) -> bytes:
        """The bytes of the rank `source` of the group."""
        assert self._group is not None
        source = dist.get_global_rank(self._group, source)
        length = torch.tensor([len(content)], device=self.device)
        dist.broadcast(length, source, group=self._group)
        memory = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if len(content) == len(memory) and content:
            memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        sent = memory.to(self.device)
        dist.broadcast(sent, source, group=self._group)
        return bytes(sent.cpu().numpy())

    def shared_name(self) -> str:
        """A random name, the same on every rank of the group; empty for one process."""
        return self.from_first(secrets.token_bytes)[:8].hex() if self.several else ""

    def _of_each_kind(self, facts: Facts) -> dict[str, Lines]:
        """The lines of every rank by its name; ranks of the least frequent kinds are left out."""
        text = json.dumps(facts.all_lines).encode()
        mine = bytearray(bytes([failure_in(facts.lines) is not None]) + hashed(text))
        digests = [bytes(row) for row in self.of_all(torch.frombuffer(mine, dtype=torch.uint8)).tolist()]
        frequent = sorted(Counter(digests).items(), key=lambda kind: (-kind[0][0], -kind[1], digests.index(kind[0])))
        sent = {kind: self._broadcast(text, digests.index(kind)) for kind, _ in frequent[:_KINDS]}
        return {self.name_of(rank): json.loads(sent[digest]) for rank, digest in enumerate(digests) if digest in sent}


class Round:
    """One exchange of ranks: a `with` statement that all ranks of some groups enter, and leave together or with an error each.

    with Round(pipeline, replicas) as r:
        made = lower(...)  # an error here raises on this rank, and `MismatchError` on all others
        r.compare(made.facts)

    The groups are asked one after the other when the body ends, and learn what failed in the groups before. `lacking`:
    afterwards, whether a rank lacks a tensor of the checksums.
    """

    def __init__(self, *groups: Agreement) -> None:
        self._groups = groups
        self._facts: tuple[Facts, ...] = ()
        self.lacking = False

    def compare(self, *facts: Facts) -> None:
        """Compare facts in each group at the end of the body; groups without facts only tell each other of failures."""
        assert len(facts) <= max(1, len(self._groups)), "facts of which no group would know"
        self._facts = facts

    def __enter__(self) -> Round:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """Ask each group. Raises `MismatchError` where ranks differ or another rank failed."""
        if error is not None and not isinstance(error, Exception):
            return  # the user has interrupted this rank
        differs: Exception | None = None
        for group, facts in zip(self._groups, (*self._facts, *[Facts()] * len(self._groups)), strict=False):
            failure = error or differs
            try:
                self.lacking |= group.compare(facts if failure is None else Facts.of_failure(failure))
            except Exception as found:  # the next groups learn of it; this rank raises its own error, else the first one
                differs = differs or found
        if error is None and differs is not None:
            raise differs


def agree_on_collectives(lines: Mapping[str, Sequence[str]], agreement: Callable[[dist.ProcessGroup], Agreement]) -> None:
    """Compare the collectives of a step, `lines` in order by the group's name, with the other ranks of each process group.

    Raises `MismatchError` if ranks would run other collectives, or in another order: they would hang in the step.
    """
    for name in sorted(lines):
        facts = Facts({"the collectives of a step, in order": lines[name]})
        agreement(group_named(name)).compare(facts)


def refuse_differences(by_rank: Mapping[str, Lines]) -> None:
    """Raise `MismatchError` with the ranks that failed; else with those that differ from the majority. Ranks: as in errors."""
    failures = {rank: error for rank, lines in by_rank.items() if (error := failure_in(lines)) is not None}
    if failures:
        raise _others_failed(failures)
    names = dict.fromkeys(name for lines in by_rank.values() for name in lines)
    values = {name: {rank: lines[name] for rank, lines in by_rank.items() if name in lines} for name in names}
    faults = [line for name in names for line in _differences(name, values[name])]
    if faults:
        raise MismatchError("the ranks do not agree, so nothing was run:\n" + "\n".join(f"  {line}" for line in faults))


def _refuse_other_calls(by_rank: Mapping[str, Lines]) -> None:
    """Raise `MismatchError` if a rank has no name of a fact in common with the first rank: it is in another call."""
    (first, mine), *others = by_rank.items()
    for rank, theirs in others:
        if mine and theirs and not mine.keys() & theirs.keys():
            raise MismatchError(
                "the ranks do not agree, so nothing was run:\n"
                f"  {first} compares {_few(mine)} with the others, {rank} {_few(theirs)}: call the same functions on all "
                "ranks, with mesh= on all of them or on none"
            )


def _others_failed(errors: Mapping[str, str]) -> MismatchError:
    """The error of a rank that could go on, with the errors of other ranks."""
    lines = (f"  {rank}: {error}" for rank, error in errors.items())
    return MismatchError("other ranks failed, so nothing was run here:\n" + "\n".join(lines))


def _differences(name: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """One line per rank that differs from the majority (from the lowest rank's value where there is none)."""
    usual, _ = Counter(tuple(value) for value in values.values()).most_common(1)[0]
    return [
        f"{rank} differs in {name}: {_first_difference(value, usual)}"
        for rank, value in values.items()
        if tuple(value) != usual
    ]


def _few(names: Collection[str]) -> str:
    """The first names, and the number of the others."""
    shown, more = list(names)[:_SHOWN], len(names) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _around(text: str, at: int) -> str:
    """A long line, shortened to its beginning and the text around position `at`."""
    if len(text) <= _LONG:
        return text
    head, tail = text[: _LONG // 3], text[max(at - _LONG // 6, _LONG // 3) : at + _LONG // 3]
    return f"{head} ... {tail} ..."


def _first_difference(value: Sequence[str], usual: Sequence[str]) -> str:
    for mine, theirs in zip(value, usual, strict=False):
        if mine != theirs:
            at = next((at for at, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), 0)
            return f"it has {_around(mine, at)}, the others have {_around(theirs, at)}"
    if len(value) > len(usual):
        return f"it also has {value[len(usual)]}"
    return f"it lacks {usual[len(value)]}"
