"""Agreement among ranks: all ranks of a group go on together, or all raise.

Ranks that run different messages or collectives would hang, so they compare facts when a pipeline is made, at the start of each
step, and when a step is compiled.

Contract:
- The ranks of one or several groups enter a `Round` and leave it together, or all raise: a rank whose body failed raises its
  own error, and every other rank `MismatchError`, which names the rank that differs and the difference.
- The check is one all-reduce of a digest of the facts, a checksum of the given tensors, and the complements of both. If these
  differ, one rank of each kind sends its text: kinds that failed, then the most frequent ones, at most `_KINDS`.
- The exchange runs on the CPU if the group has a CPU backend, so that no step waits for a GPU.
- Ranks without a group of all of them agree in the rows of a `RankTree`; a difference in one row reaches all rows.
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
from graphpp.parallel.groups import group_among, has_gloo
from graphpp.parallel.rank_tree import Ranks, RankTree

Lines = Mapping[str, Sequence[str]]  # the text of facts by name

_MADE = b"\0"  # prefix of the first rank's bytes, which an error's text lacks
_LONG = 240  # characters of a line that an error shows
_SHOWN = 3  # names of facts, and of tensors, that an error shows
_KINDS = 16  # maximal number of texts that differing ranks exchange, and of ranks that an error names
_CALL = "the call"
_SAME_CALLS = (
    "Every rank makes each call of a pipeline: move saves, evaluations and norms out of callbacks and branches of one."
)
_SAME_DATA = (
    "All ranks of a pipeline read the same batches: seed the ranks alike, and leave out samplers that give each rank its share."
)
_SAME_MODEL = "All ranks change the whole model alike: set requires_grad on the compiled model, not on one rank's part."
_LEAST = -(2**63)  # of int64


class Agreement:
    """Compares facts over the ranks of one group or tree; a single process agrees with itself."""

    def __init__(self, ranks: Ranks, device: torch.device, described: Callable[[int], str] = "rank {}".format) -> None:
        """`device`: of this rank's tensors. `described`: how an error names a rank of the world.

        The attribute `device` is that of the tensors that `message` sends.
        """
        self._described = described
        self._group = ranks if isinstance(ranks, dist.ProcessGroup) else None
        self._tree = RankTree.over(ranks) if isinstance(ranks, dist.ProcessGroup) else ranks
        self._device = torch.device("cpu") if self._tree is None or self._tree.on_gloo else device
        self.device = self._device if self._group is None or has_gloo(self._group) else device

    @property
    def ranks(self) -> int:
        return 1 if self._tree is None else len(self._tree.ranks)

    @property
    def rank(self) -> int:
        return 0 if self._tree is None else self._tree.at

    @property
    def several(self) -> bool:
        return self._tree is not None

    def compare(self, facts: Facts) -> bool:
        """Whether a rank lacks a tensor of the checksums. Raises `MismatchError` on every rank if the facts differ."""
        if self._tree is None:
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
        """Whether these bytes are equal on all ranks of the group. Called by all ranks."""
        words = struct.unpack("<2q", hashed(content))
        found = self.largest([*words, *(~word for word in words)])
        return all(high == ~low for high, low in zip(found[: len(words)], found[len(words) :], strict=True))

    def largest(self, mine: Sequence[int]) -> list[int]:
        """The maximum over all ranks of each number; `mine`: 64-bit integers, equally many on all ranks."""
        return list(mine) if self._tree is None else self._tree.largest(mine, self._device)

    def name_of(self, rank: int) -> str:
        return self._described(rank if self._tree is None else self._tree.ranks[rank])

    def message(self, operation: Callable[..., Any], tensor: torch.Tensor, peer: int) -> dist.P2POp:
        """A send or receive for `batch_isend_irecv`; `peer`: a rank of the group."""
        return dist.P2POp(operation, tensor.to(self.device), group=self._group, group_peer=peer)

    def of_all(self, mine: torch.Tensor) -> torch.Tensor:
        """The tensor `mine` of every rank (small, equal shapes), in order of rank, [ranks, ..] on the CPU."""
        return mine[None] if self._tree is None else self._tree.of_all(mine.to(self._device)).cpu()

    def of_row(self, mine: torch.Tensor) -> torch.Tensor:
        """As `of_all`, of the ranks of this rank's row: at most `ROW` in a tree, all in a group."""
        return mine[None] if self._tree is None else self._tree.of_row(mine.to(self._device)).cpu()

    def bytes_of_all(self, make: Callable[[], bytes]) -> list[bytes]:
        """The result of `make` of every rank, in order of rank; raises on all ranks if it raises on one."""
        content = b""
        with Round(self):
            content = make()
        lengths = self.of_all(torch.tensor([len(content)], device="cpu")).flatten().tolist()
        padded = torch.frombuffer(bytearray(content.ljust(max(1, *lengths), b"\0")), dtype=torch.uint8)
        rows = self.of_all(padded)
        return [bytes(row[:length].numpy()) for row, length in zip(rows, lengths, strict=True)]

    def from_first(self, make: Callable[[], bytes]) -> bytes:
        """Run `make` on the first rank only, and return its result on every rank. Called by all ranks.

        An error of `make` is raised on the first rank, and a `MismatchError` with its text on the others.
        """
        if self._tree is None:
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
        assert self._tree is not None
        length = torch.tensor([len(content)], device=self._device)
        self._tree.broadcast(length, source)
        memory = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
        if len(content) == len(memory) and content:
            memory.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        sent = memory.to(self._device)
        self._tree.broadcast(sent, source)
        return bytes(sent.cpu().numpy())

    def shared_name(self) -> str:
        """A random name, equal on every rank of the group; empty for one process."""
        return self.from_first(secrets.token_bytes)[:8].hex() if self.several else ""

    def _of_each_kind(self, facts: Facts) -> dict[str, Lines]:
        """The lines of every rank by its name, without ranks of the least frequent kinds."""
        text = json.dumps(facts.all_lines).encode()
        mine = bytearray(bytes([failure_in(facts.lines) is not None]) + hashed(text))
        digests = [bytes(row) for row in self.of_all(torch.frombuffer(mine, dtype=torch.uint8)).tolist()]
        frequent = sorted(Counter(digests).items(), key=lambda kind: (-kind[0][0], -kind[1], digests.index(kind[0])))
        sent = {kind: json.loads(self._broadcast(text, digests.index(kind))) for kind, _ in frequent[:_KINDS]}
        return {self.name_of(rank): sent[digest] for rank, digest in enumerate(digests) if digest in sent}


class Round:
    """A `with` statement that all ranks of some groups enter, and leave together or with an error each.

    with Round(pipeline, replicas) as r:
        made = lower(...)  # an error here raises on this rank, and `MismatchError` on all others
        r.compare(made.facts)

    When the body ends, the groups compare one after the other, and learn of failures in earlier groups. `lacking` is set then:
    whether a rank lacks a tensor of the checksums.
    """

    def __init__(self, *groups: Agreement) -> None:
        self._groups = groups
        self._facts: tuple[Facts, ...] = ()
        self.lacking = False

    def compare(self, *facts: Facts) -> None:
        """Compare facts in each group at the end of the body; groups without facts only exchange whether a rank failed."""
        assert len(facts) <= max(1, len(self._groups)), "facts of which no group would know"
        self._facts = facts

    def __enter__(self) -> Round:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the round. Raises `MismatchError` if ranks differ or another rank failed."""
        if error is not None and not isinstance(error, Exception):
            return  # an interrupt by the user
        differs: Exception | None = None
        for group, facts in zip(self._groups, (*self._facts, *[Facts()] * len(self._groups)), strict=False):
            failure = error or differs
            try:
                self.lacking |= group.compare(facts if failure is None else Facts.of_failure(failure))
            except Exception as found:  # passed to the next groups; this rank raises its own error, else the first found
                differs = differs or found
        if error is None and differs is not None:
            raise differs


def agree_on_collectives(
    lines: Mapping[str, Sequence[str]], agreement: Callable[[dist.ProcessGroup | None], Agreement]
) -> None:
    """Compare the collectives of a step (`lines`, in order, by group name) with the other ranks of each process group.

    Raises `MismatchError` if ranks would run other collectives or another order, and so hang in the step.
    """
    for name in sorted(lines):
        facts, models = Facts({"the collectives of a step, in order": lines[name]}), group_named(name)
        agreement(group_among(dist.get_process_group_ranks(models), models)).compare(facts)


def refuse_differences(by_rank: Mapping[str, Lines]) -> None:
    """Raise `MismatchError` with the ranks that failed, else with the ranks that differ from the majority."""
    failures = {rank: error for rank, lines in by_rank.items() if (error := failure_in(lines)) is not None}
    if failures:
        raise _others_failed(failures)
    names = dict.fromkeys(name for lines in by_rank.values() for name in lines)
    values = {name: {rank: lines[name] for rank, lines in by_rank.items() if name in lines} for name in names}
    found = {name: lines for name in names if (lines := _differences(name, values[name]))}
    if _CALL in found:  # all other differences follow from this one
        found = {_CALL: found[_CALL]}
    if found:
        more = [name for name in found if _is_data(name)][_SHOWN:]
        lines = [line for name, each in found.items() if name not in more for line in each]
        faults = [*lines, *[f"and in {len(more)} more tensors"] * bool(more), *_remedies(found)]
        raise MismatchError("the ranks do not agree, so nothing was run:\n" + "\n".join(f"  {line}" for line in faults))


def _is_data(name: str) -> bool:
    return name.startswith("the values of ") and " of microbatch " in name


def _remedies(names: Collection[str]) -> list[str]:
    """The lines that say what to change where ranks make other calls, or were given other data or models."""
    calls = any(name in (_CALL, "the number of the call") for name in names)
    return [_SAME_CALLS] * calls + [_SAME_DATA] * any(map(_is_data, names)) + [_SAME_MODEL] * ("the model" in names)


def _refuse_other_calls(by_rank: Mapping[str, Lines]) -> None:
    """Raise `MismatchError` if a rank shares no fact's name with the first rank, so that it is in another call."""
    (first, mine), *others = by_rank.items()
    for rank, theirs in others:
        if mine and theirs and not mine.keys() & theirs.keys():
            raise MismatchError(
                "the ranks do not agree, so nothing was run:\n"
                f"  {first} compares {_few(mine)} with the others, {rank} {_few(theirs)}: call the same functions on all "
                "ranks, with mesh= on all of them or on none"
            )


def _others_failed(errors: Mapping[str, str]) -> MismatchError:
    lines = _first([f"{rank}: {error}" for rank, error in errors.items()], "failed")
    return MismatchError("other ranks failed, so nothing was run here:\n" + "\n".join(f"  {line}" for line in lines))


def _first(lines: Sequence[str], what: str) -> list[str]:
    """The lines of the first ranks."""
    return [*lines[:_KINDS], *[f"and {len(lines) - _KINDS} more ranks {what}"] * (len(lines) > _KINDS)]


def _differences(name: str, values: Mapping[str, Sequence[str]]) -> list[str]:
    """Lines of the ranks that differ from the majority, or without a majority from the lowest rank's value."""
    usual, _ = Counter(tuple(value) for value in values.values()).most_common(1)[0]
    others = {rank: value for rank, value in values.items() if tuple(value) != usual}
    lines = [f"{rank} differs in {name}: {_first_difference(value, usual)}" for rank, value in others.items()]
    return _first(lines, f"differ in {name}")


def _few(names: Collection[str]) -> str:
    shown, more = list(names)[:_SHOWN], len(names) - _SHOWN
    return ", ".join(shown) + (f" and {more} more" if more > 0 else "")


def _around(text: str, at: int) -> str:
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
