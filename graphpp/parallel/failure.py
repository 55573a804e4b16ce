"""Lost ranks: when a rank dies, every other rank raises an error that names it.

Contract
--------
- The first rank that notices the loss writes it into the store that all ranks share. A rank that notices later, because its own
  neighbour ended in turn, reads the first cause there. A rank that fails by itself writes its own number and error.
- A lost rank is found by sending to every rank of the group (gloo). If the store was lost with its host, the error has this
  rank's own finding.
- An entry in the store belongs to one call of one pipeline: a failure that the job survived does not appear in later errors.
- Errors name ranks by their numbers in the world.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from graphpp._torch.distributed import default_store
from graphpp.errors import GraphPPError, RankFailure
from graphpp.parallel.agreement import has_gloo

_TAG = 0x6C6F7374  # messages of a step have no tag, so no receive matches a probe
_STORE_TIMEOUT = timedelta(seconds=5)


class FailureBoard:
    """Turns the errors that follow the loss of a rank into a `RankFailure` that names the rank that was lost first."""

    def __init__(self, group: dist.ProcessGroup | None, name: str) -> None:
        self._group = group if group is not None and dist.get_world_size(group) > 1 else None
        self._name = name
        self._calls = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch one call that every rank makes: raise `RankFailure` if a rank is lost, publish a failure of this rank."""
        self._calls += 1
        try:
            yield
        except GraphPPError:
            raise
        except Exception as error:
            if self._group is None:
                raise
            self._tell(error)
            raise

    def _tell(self, error: Exception) -> None:
        """Raise `RankFailure` if a rank is lost; else publish that this rank failed."""
        lost = self._lost(error)
        if lost:
            known = self._publish(_fate(lost, late="Timed out" in str(error)))
            raise RankFailure(
                f"{known}, and rank {dist.get_rank()} cannot finish this step: {_reason(error)}.\n"
                "Restart all ranks from the last checkpoint; the log of the lost rank says why it ended."
            ) from error
        self._publish(f"rank {dist.get_rank()} failed with {type(error).__name__}: {error}")

    def _lost(self, error: Exception) -> list[int]:
        """The ranks (of the world) that cannot be reached, or whose message did not arrive."""
        assert self._group is not None
        others = [rank for rank in range(dist.get_world_size(self._group)) if rank != dist.get_rank(self._group)]
        lost = {error.peer} if isinstance(error, PeerLost) and error.peer is not None else set()
        if has_gloo(self._group):
            lost |= {rank for rank in others if not self._reaches(rank)}
        return [dist.get_global_rank(self._group, rank) for rank in sorted(lost)]

    def _reaches(self, rank: int) -> bool:
        try:
            dist.isend(torch.zeros(1, device="cpu"), group=self._group, group_dst=rank, tag=_TAG)
        except RuntimeError:
            return False
        return True

    def _publish(self, text: str) -> str:
        """Write the text unless another rank has written one for this call; returns the text in the store, or the own one."""
        try:
            store = default_store()
            before = store.timeout  # type: ignore[attr-defined]  # missing from torch's stubs
            store.set_timeout(_STORE_TIMEOUT)
            try:
                return str(store.compare_set(f"graphpp/lost/{self._name}/{self._calls}", "", text).decode()) or text
            finally:
                store.set_timeout(before)
        except RuntimeError:
            return text


def _fate(ranks: list[int], *, late: bool) -> str:
    """`rank 3 is lost`, `ranks 0, 3 are lost`, `rank 1 did not answer in time`."""
    noun, verb = ("rank", "is") if len(ranks) == 1 else ("ranks", "are")
    return f"{noun} {', '.join(map(str, ranks))} {'did not answer in time' if late else f'{verb} lost'}"


def _reason(error: Exception) -> str:
    """gloo's error without its source line and its advice."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", line).partition(". ")[0]


class PeerLost(RuntimeError):  # noqa: N818 - it names an event
    """A message to or from `peer` (rank of the group; None: one of several) could not be completed."""

    def __init__(self, peer: int | None, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
