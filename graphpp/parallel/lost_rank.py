"""Lost ranks: when a rank dies, every other rank raises an error that names it.

Contract:
- The first rank that notices a failure finds the lost rank by sending to every rank of the group (gloo), and publishes its
  finding in the common store. A rank that notices later, perhaps because a neighbour has ended after the failure, reads the
  finding and sends only to the ranks in it. A rank that fails by itself publishes its own number and error.
- A rank that notices a failure and ends leaves a note, so that ranks one call earlier or later do not take it for lost.
- If the store was lost with its host, the error has this rank's own finding.
- An entry in the store belongs to one call of one pipeline, so a failure that the job survived is in no later error.
- On a GPU a call returns before its messages have arrived, so the host may wait elsewhere, as in `loss.item()`. A thread then
  logs which rank is lost, or which is late when half of the timeout has passed (`look`). NCCL's watchdog ends the process.
- A rank that waits in a call for `slow_after` seconds asks likewise, and logs one warning that names the ranks that are not in
  this call. No line follows from a wait for ranks that are: of a message, the mailbox logs one.
- After a timeout every rank is asked over the store (`late_rank.py`), which tells a stopped process from a late one; for a
  late rank the error names the line that it has reached. A late rank's own error says that the others gave up waiting for it.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from graphpp._torch.distributed import default_store, timeout_of
from graphpp.errors import GraphPPError, RankFailure
from graphpp.log import logger
from graphpp.parallel import late_rank
from graphpp.parallel.groups import PeerLost, has_gloo, reaches
from graphpp.parallel.late_rank import SlowWaits
from graphpp.parallel.rank_tree import Ranks, RankTree

_LOG = logger(__name__)
_STORE_TIMEOUT = timedelta(seconds=5)
_CONNECTION = ("Connection reset", "Connection closed", "Connection refused", "Broken pipe")  # gloo's words for a lost peer
_PROBES, _BETWEEN_PROBES = 5, 0.2  # seconds
_LATE = "did not answer in time"
_RESTART = (
    "Restart all ranks from the last checkpoint; the log of the lost rank says why it ended. If its program was at its end, "
    "the other ranks make a call that it does not make."
)


class FailureBoard:
    """Turns an error caused by the loss of a rank into a `RankFailure` that names the rank that was lost first."""

    def __init__(
        self,
        groups: Sequence[Ranks],
        name: str,
        described: Callable[[int], str] = "rank {}".format,
        mark: Callable[[], Callable[[], bool]] | None = None,
        peers: dist.ProcessGroup | None = None,
        slow_after: float | None = None,
    ) -> None:
        """`groups`: the ranks of a call, and this rank's replicas. `described`: how an error names a rank.

        `peers`: the group in which the peer of a `PeerLost` is counted (None: the first of `groups`). `mark` is called after
        a call; its result says whether the device has done the call's work by now. None: a call returns when its messages
        have arrived. `slow_after`: the seconds in a call after which a warning names a late rank; None: never.
        """
        self._peers = peers
        self._described = described
        trees = [RankTree.over(each) if isinstance(each, dist.ProcessGroup) else each for each in groups]
        several = [tree for tree in trees if tree is not None and len(tree.ranks) > 1]
        self._pipeline = trees[0]
        self._groups = [group for tree in several for group in tree.groups]
        self._ranks = {rank for tree in several for rank in tree.ranks}
        self._name = name
        self._calls = 0
        self._mark, self._issued = mark if self._groups else None, _Issued("", lambda: True, 0.0)
        self._slow = None if slow_after is None or not self._groups else SlowWaits(slow_after)
        self._running: _Issued | None = None
        if self._mark is not None or self._slow is not None:
            late_rank.when_idle(self)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        self._calls += 1
        if self._groups:
            late_rank.start()
        with late_rank.calling(self._key("")):
            outer, self._running = self._running, _Issued(self._key("slow/"), lambda: False, 0.0)
            try:
                yield
            except GraphPPError:
                raise
            except Exception as error:
                if self._groups:
                    self._tell(error)
                raise
            finally:
                self._running = outer
            if self._mark is not None:
                timeout = min(timeout_of(group).total_seconds() for group in self._groups)
                self._issued = _Issued(self._key(""), self._mark(), timeout)

    def look(self) -> None:
        """Log once which rank is lost or late if the device has not finished the latest call."""
        self._look_for_slow()
        issued, waiting = self._issued, late_rank.line()
        if issued.told or issued.done():
            return
        lost, seconds = self._lost(PeerLost(None, ""), None), time.monotonic() - issued.began
        found = _Finding(tuple(lost), f"{'is' if len(lost) == 1 else 'are'} lost") if lost else None
        if found is None and seconds > issued.timeout / 2:
            found = self._asked_once(issued)
        if found is None or issued is not self._issued or issued.done():
            return
        issued.told = True
        ranks = ", ".join(map(self._described, found.ranks))
        _LOG.error(
            "%s %s, and the GPU of %s waits for a message, the host at %s. NCCL ends this process after a wait of %g s. %s",
            ranks, found.fate, self._described(dist.get_rank()), waiting, issued.timeout, _RESTART,
        )  # fmt: skip

    def _look_for_slow(self) -> None:
        """Log once which rank is not in the call in which this rank has waited long."""
        running = self._running
        if running is None or running.told or self._slow is None:
            return
        seconds = time.monotonic() - running.began
        found = self._asked_once(running) if seconds > self._slow.limit else None
        if found is not None and running is self._running and self._slow.says(seconds):
            running.told = True
            here, ranks = self._described(dist.get_rank()), ", ".join(map(self._described, found.ranks))
            _LOG.warning("%s has waited %.0f s in a call for %s, which %s", here, seconds, ranks, found.fate)

    def _asked_once(self, issued: _Issued) -> _Finding | None:
        """The late ranks of a call: the first rank that looks asks all ranks, and the others read its finding in the store."""
        try:
            store, key = default_store(), f"{issued.call}waits"
            if issued.asks is None:
                issued.asks = int(store.add(key, 1)) == 1
            found = self._late((), None if issued is self._running else issued.call) if issued.asks else None
            if found is not None:
                store.set(f"{key}/found", json.dumps([found.ranks, found.fate]))
            elif not issued.asks and store.check([f"{key}/found"]):
                found = _Finding.read(store.get(f"{key}/found"))
        except RuntimeError:  # the store is lost
            return None
        return found

    def _tell(self, error: Exception) -> None:
        """Raise `RankFailure` if a rank is lost or late; else publish this rank's failure."""
        with contextlib.suppress(RuntimeError):  # the store is lost
            default_store().set(self._end_of(dist.get_rank()), str(self._calls))
        me, known = dist.get_rank(), None if self._is_first() else self._published()
        lost = self._lost_by_now(error, known)
        if known is not None and ("Timed out" in str(error) or not self._probed.issuperset(known.ranks)):
            lost = lost or list(known.ranks)  # a late rank still answers the probe, and a rank of another row is not asked
        if known is not None and me in known.ranks:
            raise RankFailure(
                f"the other ranks have given up this step, because {self._described(me)}, this one, {known.fate}.\n{_RESTART}"
            ) from error
        if known is None:
            found = self._late(lost) if "Timed out" in str(error) else None
            if found is None and lost:
                found = _Finding(tuple(lost), f"{'is' if len(lost) == 1 else 'are'} lost")
            known = self._publish(found or _Finding((me,), f"failed with {type(error).__name__}: {error}"))
            lost = list(found.ranks) if found is not None else []
        if lost:
            ranks = ", ".join(map(self._described, known.ranks))
            raise RankFailure(
                f"{ranks} {known.fate}, and {self._described(me)} cannot finish this step: {_reason(error)}.\n{_RESTART}"
            ) from error

    def _late(self, waited_for: Sequence[int], issued: str | None = None) -> _Finding | None:
        """The ranks for which the others wait after a timeout; None if all ranks can be reached, run, and wait too.

        `issued`: the call whose work this rank's device has not done, though the host has left it; None: the host is in a call.
        """
        try:
            answers = late_rank.ask(sorted(self._ranks - {dist.get_rank()}))
        except RuntimeError:  # the store is lost
            return _Finding(tuple(waited_for), _LATE) if waited_for else None
        stopped = tuple(rank for rank, answer in answers.items() if answer is None)
        if stopped:
            return _Finding(stopped, f"{_LATE}: stopped by a signal or a debugger, with its host, or in native code")
        runs = [(rank, answer) for rank, answer in answers.items() if answer is not None]
        late = tuple(rank for rank, answer in runs if not self._waits(rank, answer, issued)) or tuple(waited_for)
        if not late:
            return None
        reached = answers[late[0]]
        where = f", and is at {reached.line}" if reached is not None else ""
        return _Finding(late, f"{_LATE}: the process of rank {late[0]} runs{where}")

    def _waits(self, rank: int, answer: late_rank.Answer, issued: str | None) -> bool:
        """Whether a rank waits as this one does: in the same call, or its host has issued the same call too."""
        # A rank of another replica makes the same calls of its own pipeline, whose name differs.
        is_replica = self._pipeline is None or rank not in self._pipeline.ranks
        if issued is None:
            return answer.call == self._key("") or (is_replica and answer.call is not None)
        number = f"/{issued.split('/')[-2]}/"
        return issued in answer.ended or (is_replica and any(each.endswith(number) for each in answer.ended))

    def _lost_by_now(self, error: Exception, known: _Finding | None) -> list[int]:
        """Like `_lost`; retries for a second after a lost connection: a dying process closes connections one by one."""
        for _ in range(_PROBES):
            lost = self._lost(error, known)
            if lost or not any(words in str(error) for words in _CONNECTION):
                return lost
            time.sleep(_BETWEEN_PROBES)
        return []

    def _lost(self, error: Exception, known: _Finding | None) -> list[int]:
        """The world ranks (of the known ones, if given) that cannot be reached or whose message did not arrive."""
        lost = set[int]()
        if isinstance(error, PeerLost) and error.peer is not None and self._pipeline is not None:
            counted = self._pipeline.ranks if self._peers is None else dist.get_process_group_ranks(self._peers)
            lost.add(counted[error.peer])
        for group in filter(has_gloo, self._groups):
            ranks = dist.get_process_group_ranks(group)
            suspects = self._ranks.intersection(ranks if known is None else known.ranks, ranks) - {dist.get_rank()}
            lost |= {rank for rank in suspects if not reaches(group, ranks.index(rank))}
        first = lost - self._ended_by_themselves(lost) if len(lost) > 1 else lost
        return sorted(first or lost)

    @property
    def _probed(self) -> set[int]:
        """The world ranks to which this rank has a connection of gloo, itself among them."""
        return {rank for group in filter(has_gloo, self._groups) for rank in dist.get_process_group_ranks(group)}

    def _key(self, name: str) -> str:
        return f"graphpp/lost/{self._name}/{self._calls}/{name}"

    def _end_of(self, rank: int) -> str:
        return f"graphpp/ended/{self._name}/{rank}"

    def _is_first(self) -> bool:
        """Whether no other rank has noticed a failure in this call before, or the store is lost."""
        try:
            return int(default_store().add(self._key("looks"), 1)) == 1
        except RuntimeError:
            return True

    def _published(self) -> _Finding | None:
        """The finding of the first rank, which this rank awaits for a moment."""
        try:
            store = default_store()
            store.wait([self._key("found")], _STORE_TIMEOUT + timedelta(seconds=late_rank.patience()))
            return _Finding.read(store.get(self._key("found")))
        except RuntimeError:
            return None

    def _publish(self, finding: _Finding) -> _Finding:
        """Write the finding unless the store has one for this call; returns the store's, or without a store `finding`."""
        try:
            store = default_store()
            before = store.timeout  # type: ignore[attr-defined]  # missing from torch's stubs
            store.set_timeout(_STORE_TIMEOUT)
            try:
                return _Finding.read(store.compare_set(self._key("found"), "", json.dumps([finding.ranks, finding.fate])))
            finally:
                store.set_timeout(before)
        except RuntimeError:
            return finding

    def _ended_by_themselves(self, ranks: Iterable[int]) -> set[int]:
        """The given ranks that have noticed a failure in this call or the one before or after, and ended."""
        try:
            store = default_store()
            noted = {rank: int(store.get(key)) for rank in ranks if store.check([key := self._end_of(rank)])}
        except RuntimeError:
            return set()
        return {rank for rank, calls in noted.items() if abs(calls - self._calls) <= 1}


@dataclass(eq=False)
class _Issued:
    """A call that has returned. `done`: whether the device has done its work; `timeout`: seconds, of its messages."""

    call: str
    done: Callable[[], bool]
    timeout: float
    began: float = field(default_factory=time.monotonic)
    told: bool = False
    asks: bool | None = None  # whether this rank asks the others; None: not decided yet


@dataclass(frozen=True)
class _Finding:
    """The world ranks that failed first, and their fate: `is lost`, `did not answer in time: ..`, or an error."""

    ranks: tuple[int, ...]
    fate: str

    @classmethod
    def read(cls, written: bytes) -> _Finding:
        ranks, fate = json.loads(written)
        return cls(tuple(ranks), fate)


def _reason(error: Exception) -> str:
    """gloo's error without its source line and its advice."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[\S+\.(cc|cpp|h):\d+\] ", "", line).partition(". ")[0]
