"""The memory of a step as data: bytes by kind at each rank's peak and over time, with the cap.

Contract: the input is (time, bytes by kind) pairs of each rank, as from `bytes_over_time`. A long curve keeps the moment with
most bytes in each of equal time spans, so it keeps the peak. Kinds without bytes on any rank are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphpp.errors import GraphPPError

_MOST_MOMENTS = 20_000  # over all ranks
_FEWEST = 100  # of a rank
_ORDER = ("weights", "shards", "gradients", "optimizer", "buffers", "messages", "activations")

Moment = tuple[float, Mapping[str, int]]


@dataclass(frozen=True)
class RankBytes:
    """One rank's bytes. `peak`: by kind; `together`: the most at one time; `times`, `curves`: by kind, over time."""

    rank: int
    peak: tuple[int, ...]
    together: int
    cap: int | None = None
    times: tuple[float, ...] = field(default=(), repr=False)
    curves: tuple[tuple[int, ...], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class MemoryView:
    """`kinds`: the order of bytes in `RankBytes`; `unit`: of times; `note`: a sentence; `head`: the moment of
    `RankBytes.peak`."""

    kinds: tuple[str, ...]
    ranks: tuple[RankBytes, ...]
    unit: str = "s"
    note: str = ""
    head: str = "At the moment with most bytes"

    @classmethod
    def of(
        cls, moments: Sequence[Iterable[Moment]], caps: Sequence[int] | None = None, unit: str = "s", note: str = ""
    ) -> MemoryView:
        """Raises `GraphPPError` if the numbers of caps and ranks differ, or if a rank has no moments."""
        if caps is not None and len(caps) != len(moments):
            raise GraphPPError(f"caps: give the bytes of each of {len(moments)} ranks, got {len(caps)} numbers")
        most = max(_MOST_MOMENTS // max(len(moments), 1), _FEWEST)
        thinned = [_thinned(list(each), most) for each in moments]
        for rank, each in enumerate(thinned):
            if not each:
                raise GraphPPError(f"moments: rank {rank} has none, so its memory is unknown: leave the memory out")
        present = {kind for each in thinned for _, parts in each for kind, nbytes in parts.items() if nbytes}
        kinds = (*(kind for kind in _ORDER if kind in present), *sorted(present - set(_ORDER)))
        ranks = (_of_rank(rank, each, kinds, caps[rank] if caps else None) for rank, each in enumerate(thinned))
        return cls(kinds, tuple(ranks), unit, note)

    def moments(self, most: int) -> list[tuple[int, float, tuple[int, ...]]]:
        """(rank, time, bytes by kind), about `most` in all; each rank's peak is included."""
        found: list[tuple[int, float, tuple[int, ...]]] = []
        for each in self.ranks:
            by_time = zip(each.times, zip(*each.curves, strict=True), strict=True)
            own = [(time, dict(zip(self.kinds, parts, strict=True))) for time, parts in by_time]
            few = _thinned(own, max(most // len(self.ranks) - 2, 1))
            found += ((each.rank, time, tuple(parts.values())) for time, parts in few)
        return found

    @property
    def over_time(self) -> bool:
        return any(len(each.times) > 1 for each in self.ranks)


def _thinned(moments: Sequence[Moment], most: int) -> list[Moment]:
    """About `most` moments: the first, the last, and the largest of each time span."""
    if len(moments) <= most:
        return list(moments)
    begin, end = moments[0][0], moments[-1][0]
    found: dict[int, Moment] = {}
    for moment in moments[1:-1]:
        span = int((moment[0] - begin) / (end - begin) * most) if end > begin else 0
        if span not in found or _total(moment) > _total(found[span]):
            found[span] = moment
    return [moments[0], *found.values(), moments[-1]]


def _total(moment: Moment) -> int:
    return sum(moment[1].values())


def _of_rank(rank: int, moments: Sequence[Moment], kinds: Sequence[str], cap: int | None) -> RankBytes:
    _, largest = max(moments, key=_total)
    curves = tuple(tuple(parts.get(kind, 0) for _, parts in moments) for kind in kinds)
    peak = tuple(largest.get(kind, 0) for kind in kinds)
    return RankBytes(rank, peak, sum(peak), cap, tuple(time for time, _ in moments), curves)
