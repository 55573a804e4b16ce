"""Do all ranks mean the same? Asked when a pipeline is made, at the start of each step, for whatever is built anew.

Contract
--------
- `Agreement.together` is called by every rank of the group. Either it returns on all of them, or it raises on all of
  them: a rank whose own work failed raises its own error, every other one `MismatchError`, which says which rank
  differs and in what.
- Facts are lines of text under names; nothing is pickled. A name that a rank does not have is not compared on it.
- Where all agree, and that is nearly always, the ranks exchange 16 bytes; the texts travel only where they differ.
- They travel on the CPU where the group has a backend for it, so that no step waits for a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist

from graphpp._torch.distributed import group_named
from graphpp.errors import MismatchError

T = TypeVar("T")

_ERROR = "error"
_DIGEST_BYTES = 16
_LONG = 240  # characters of a line that are shown


@dataclass(frozen=True)
class Facts:
    """What a rank is about to do: name -> lines of text. Compared by digest first."""

    lines: Mapping[str, Sequence[str]]

    @classmethod
    def of_failure(cls, error: BaseException) -> Facts:
        """The facts of a rank whose own work failed."""
        return cls({_ERROR: [f"{type(error).__name__}: {error}"]})

    @cached_property
    def text(self) -> str:
        """The facts as JSON."""
        return json.dumps({name: list(lines) for name, lines in self.lines.items()})

    def adding(self, name: str, lines: Sequence[str]) -> Facts:
        """These facts and some that differ from call to call; what is cached of these is used again."""
        return _More(self.lines, self, Facts({name: lines}))

    @cached_property
    def digest(self) -> bytes:
        """Equal exactly if the texts are."""
        return hashlib.sha256(self.text.encode()).digest()[:_DIGEST_BYTES]


@dataclass(frozen=True)
class _More(Facts):
    """Facts with others added."""

    base: Facts
    more: Facts

    @cached_property
    def text(self) -> str:
        """All of them as JSON."""
        return json.dumps({**json.loads(self.base.text), **json.loads(self.more.text)})

    @cached_property
    def digest(self) -> bytes:
        """Equal exactly if the digests of both are."""
        return hashlib.sha256(self.base.digest + self.more.text.encode()).digest()[:_DIGEST_BYTES]


class Agreement:
    """Compares facts over the ranks of one group; with one process there is nobody to ask."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._device = torch.device("cpu") if self._group is None or has_gloo(self._group) else device

    @property
    def several(self) -> bool:
        """Whether there is anybody to ask."""
        return self._group is not None

    def together(self, work: Callable[[], T], facts: Callable[[T], Facts]) -> T:
        """Do `work`, compare the facts of what came out over all ranks, return it."""
        try:
            result = work()
            about = facts(result)
        except Exception as error:
            with contextlib.suppress(MismatchError):  # the others are told; this rank raises what went wrong on it
                self.compare(Facts.of_failure(error))
            raise
        self.compare(about)
        return result

    def compare(self, facts: Facts) -> None:
        """Return if the facts are the same on every rank, else raise `MismatchError` on every rank."""
        if self._group is None:
            return
        mine = torch.frombuffer(bytearray(facts.digest), dtype=torch.uint8)
        if len({bytes(each.tolist()) for each in self._gather(mine)}) > 1:
            everyone = [json.loads(text) for text in self._texts(facts.text)]
            _refuse(everyone, [dist.get_global_rank(self._group, rank) for rank in range(len(everyone))])

    def shared_name(self) -> str:
        """A name that is the same on every rank of the group and like no other."""
        if self._group is None:
            return ""
        drawn = torch.randint(2**62, (1,), generator=_fresh_generator(), device="cpu")
        return f"{int(self._gather(drawn)[0]):x}"

    def _texts(self, text: str) -> list[str]:
        """Every rank's text, in order of rank."""
        mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = [int(each) for each in self._gather(torch.tensor([mine.numel()], device="cpu"))]
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: mine.numel()] = mine
        parts = zip(self._gather(padded), lengths, strict=True)
        return [bytes(part[:length].tolist()).decode() for part, length in parts]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """One small tensor of every rank, on the CPU."""
        assert self._group is not None
        sent = mine.to(self._device)
        received = [torch.empty_like(sent) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(received, sent, group=self._group)
        return [each.cpu() for each in received]


def agree_on_collectives(lines: Mapping[str, Sequence[str]], device: torch.device) -> None:
    """Compare what a step exchanges over each process group with that group's ranks; `lines` are in order, by group's name.

    Ranks that would exchange other values, or in another order, get `MismatchError` here and would hang in the step.
    """
    for name in sorted(lines):
        facts = Facts({"the collectives of a step, in order": lines[name]})
        Agreement(group_named(name), device).compare(facts)


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the group can exchange tensors on the CPU."""
    return "cpu:gloo" in dist.get_backend_config(group)


def _fresh_generator() -> torch.Generator:
    """Random numbers of their own: the user's generator stays where it is."""
    generator = torch.Generator()
    generator.seed()
    return generator


def _refuse(everyone: Sequence[Mapping[str, Sequence[str]]], ranks: Sequence[int]) -> None:
    """Say which rank failed; if none did, which rank differs from the majority, and in what. Ranks are the world's."""
    failures = [f"rank {rank}: {each[_ERROR][0]}" for rank, each in zip(ranks, everyone, strict=True) if _ERROR in each]
    if failures:
        raise MismatchError(
            "other ranks failed, so nothing was run here:\n" + "\n".join(f"  {line}" for line in failures)
        )
    names = dict.fromkeys(name for each in everyone for name in each)
    faults = [
        line
        for name in names
        for line in _differences(
            name, {rank: each[name] for rank, each in zip(ranks, everyone, strict=True) if name in each}
        )
    ]
    if faults:
        raise MismatchError("the ranks do not agree, so nothing was run:\n" + "\n".join(f"  {line}" for line in faults))


def _differences(name: str, values: Mapping[int, Sequence[str]]) -> list[str]:
    """One line per rank that differs from the majority (from the lowest rank's value where there is none)."""
    usual, _ = Counter(tuple(value) for value in values.values()).most_common(1)[0]
    return [
        f"rank {rank} differs in {name}: {_first_difference(value, usual)}"
        for rank, value in values.items()
        if tuple(value) != usual
    ]


def _around(text: str, at: int) -> str:
    """A long line cut to its beginning and what stands around position `at`."""
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
