"""Do all ranks mean the same pipeline? Asked once per captured graph, before its first step.

Contract: `agree` is called by every rank of the group; either all return, or all raise `MismatchError` with the same text,
which says which rank differs and in what. A rank that failed on its own takes part with its error, so nobody waits for it.
Facts are plain text; nothing is pickled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from graphpp.errors import MismatchError

Facts = Mapping[str, Sequence[str]]
_ERROR = "error"


def failed(error: BaseException) -> Facts:
    """The facts of a rank that could not prepare its pipeline."""
    return {_ERROR: [f"{type(error).__name__}: {error}"]}


def agree(facts: Facts, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Compare `facts` (name -> lines) over all ranks; raise `MismatchError` on every rank where they differ."""
    if group is None or dist.get_world_size(group) == 1:
        return
    everyone = [json.loads(text) for text in _gather(json.dumps(facts), group, device)]
    _refuse_failures(everyone)
    names = dict.fromkeys(name for each in everyone for name in each)
    faults = [line for name in names for line in _differences(name, [each.get(name, []) for each in everyone])]
    if faults:
        raise MismatchError("the ranks do not agree, so no step was run:\n" + "\n".join(f"  {line}" for line in faults))


def _refuse_failures(everyone: Sequence[Facts]) -> None:
    failures = [f"rank {rank}: {each[_ERROR][0]}" for rank, each in enumerate(everyone) if _ERROR in each]
    if failures:
        raise MismatchError("the pipeline could not be prepared:\n" + "\n".join(f"  {line}" for line in failures))


def _differences(name: str, values: Sequence[Sequence[str]]) -> list[str]:
    """One line per rank that differs from the majority (the lowest rank's value where there is none)."""
    usual, _ = Counter(tuple(value) for value in values).most_common(1)[0]
    return [
        f"rank {rank} differs in {name}: {_first_difference(value, usual)}"
        for rank, value in enumerate(values)
        if tuple(value) != usual
    ]


def _first_difference(value: Sequence[str], usual: Sequence[str]) -> str:
    for mine, theirs in zip(value, usual, strict=False):
        if mine != theirs:
            return f"it has {mine}, the others have {theirs}"
    if len(value) > len(usual):
        return f"it also has {value[len(usual)]}"
    return f"it lacks {usual[len(value)]}"


def _gather(text: str, group: dist.ProcessGroup, device: torch.device) -> list[str]:
    """Every rank's text, in order of rank."""
    ranks = dist.get_world_size(group)
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)
    length = torch.tensor([mine.numel()], device=device)
    lengths = [torch.empty_like(length) for _ in range(ranks)]
    dist.all_gather(lengths, length, group=group)
    longest = max(int(each) for each in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    parts = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(parts, padded, group=group)
    return [bytes(part[: int(size)].tolist()).decode() for part, size in zip(parts, lengths, strict=True)]
