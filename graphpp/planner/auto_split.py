"""Find the cut with the fastest step: distribute the segments of a forward over the stages of a table.

Contract
    in   the segments (`segments.py`), the table that the ranks run, the bytes that each rank may hold (None: any)
    out  the first segment of each stage. The simulator gives a cut's seconds, the memory plan its bytes (or `priced` both)
    Every stage gets at least one segment. Of the cuts within the caps the fastest is taken, then the one with the fewest bytes,
    then the one that cuts latest. If none fits, the cut with the least excess is taken, and the check of the whole plan names
    the rank. Equal arguments give equal cuts.

Each rank's work gives a lower bound of the seconds. If all cuts can be listed, they are simulated in the order of this bound
until the next bound exceeds the best value, which proves the best cut. Otherwise, or if the simulations do not suffice, a local
search moves starts while the value falls, from a balanced cut (`balance.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations
from math import comb, inf

from graphpp.errors import SplitError
from graphpp.planner.balance import balanced
from graphpp.planner.segments import Cut, Segments
from graphpp.planner.split_by_name import some
from graphpp.schedules.check.step_memory import step_peaks
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import HeldBytes, StateBytes

_LISTED = 50_000  # most cuts to list
_WORK = 150_000  # simulated actions, some seconds; half of them in the order of the bounds
_DIGITS = 9  # significant digits of compared seconds, since simulated times differ by rounding

Value = tuple[float, float, int]
"""(bytes over the cap, seconds of a step, bytes of the fullest rank): less is better."""


@dataclass(frozen=True, eq=False)
class CutSearch:
    """The search for one table. `held`: maps the stages' state to each rank's; `caps`: bytes by rank. `fixed`: the positions
    where the stages after the first one start, and the last stages, that are not searched. `priced`: gives the value of a cut,
    for a caller that knows more of a step; `most`: cuts to simulate (None: by the table's length)."""

    segments: Segments
    table: Schedule
    held: Callable[[Sequence[StateBytes]], Sequence[HeldBytes]]
    caps: Sequence[int] | None = None
    fixed: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    priced: Callable[[Cut], Value] | None = None
    most: int | None = None

    def best(self, known: Iterable[Cut] = ()) -> Cut:
        """The best cut that the search reaches, no worse than the `known` ones. Raises `SplitError` for fewer segments than
        stages."""
        pieces, stages = len(self._free), self._searched
        if stages > pieces or stages < 1:
            raise SplitError(
                f'split="auto": {some(stages, "stage")} do not fit, the model can be cut into {some(pieces, "piece")} at its '
                "module calls: take fewer stages, or list FQNs, with an empty list for an empty stage"
            )
        if stages == 1:
            return self._whole((self._free[0],))
        if comb(pieces - 1, stages - 1) > _LISTED:
            return self.moved(min([self._balanced(waits=False), self._balanced(waits=True), *known], key=self.value))
        first, proven = self._listed()
        return first if proven else self.moved(min([first, *known], key=self.value))

    def starts(self, equal_layers: Callable[[], tuple[int, ...]]) -> tuple[int, ...]:
        """The first operation of each stage of a cut that is no worse than stages of equal numbers of layers."""
        known = list[Cut]()
        with suppress(SplitError):  # fewer layers than stages
            equal = equal_layers()
            known += [tuple(map(self._number.__getitem__, equal))] if self._number.keys() >= set(equal) else []
        return tuple(self.segments.starts[first] for first in self.best(known))

    @cached_property
    def _number(self) -> dict[int, int]:
        return {position: segment for segment, position in enumerate(self.segments.starts)}

    @cached_property
    def _ends(self) -> tuple[Cut, Cut]:
        """The first segments of the stages that are not searched: before and after the others."""
        before, after = (tuple(self._number[position] for position in each) for each in self.fixed)
        return ((0, *before[:-1]) if before else ()), after

    @cached_property
    def _free(self) -> range:
        """The segments of the stages that are searched."""
        before, after = self.fixed
        first = self._number[before[-1]] if before else 0
        return range(first, self._number[after[0]] if after else len(self.segments.starts))

    @property
    def _searched(self) -> int:
        return self.table.stages - sum(map(len, self._ends))

    def _whole(self, searched: Cut) -> Cut:
        before, after = self._ends
        return (*before, *searched, *after)

    # ------------------------------------------------------------------------------ the value of a cut

    def value(self, cut: Cut) -> Value:
        if self.priced is not None:
            return self.priced(cut)
        costs, state = self.segments.stages(cut)
        peaks = [peak.nbytes for peak in step_peaks(self.table, costs, self.held(state))]
        lacking = max((own - cap for own, cap in zip(peaks, self.caps, strict=True)), default=0) if self.caps is not None else 0
        return max(0, lacking), rounded(simulate(self.table, costs).makespan), max(peaks)

    def bound(self, cut: Cut) -> float:
        """A lower bound of a step's seconds: a rank waits for its first stage, works, and earlier stages finish after it."""
        ends = [*cut[1:], len(self.segments.starts)]
        works, exchanged = [0.0] * self.table.ranks, [0.0] * self.table.ranks
        fill = [inf] * self.table.ranks
        for stage, (first, end) in enumerate(zip(cut, ends, strict=True)):
            rank = self.table.rank_of_stage[stage]
            works[rank] += self._work[end] - self._work[first]
            exchanged[rank] += self._exchanged[end] - self._exchanged[first]
            fill[rank] = min(fill[rank], self._fill[first])
        hidden, share = self.segments.costs.hidden, min(1.0, self.segments.costs.overlap)
        works = [own - hidden * min(most, own / 2) for own, most in zip(works, exchanged, strict=True)]
        found = max(own + wait for own, wait in zip(works, fill, strict=True) if wait < inf)
        return rounded(share * found if self._weaves else found)

    @cached_property
    def _work(self) -> list[float]:
        """Prefix sums of the seconds of all microbatches over the segments."""
        costs = self.segments.costs
        each = (self._of(stage, costs) * self.table.microbatches for stage in range(len(costs.stages)))
        return [0.0, *accumulate(each)]

    @cached_property
    def _fill(self) -> list[float]:
        """Seconds before a segment's first forward, plus those after its last backward if no weight gradient can fill them."""
        parts = self.segments.costs.stages
        hidden, waits = self.segments.costs.hidden * self._weaves, Kind.B in self.table.kinds and not self._splits
        after = [
            self._least(part, (Kind.B,)) - hidden * part.lines(Kind.B).exchanged if waits else 0.0 for part in parts
        ]
        return [0.0, *accumulate(part.forward + drain for part, drain in zip(parts, after, strict=True))]

    @cached_property
    def _exchanged(self) -> list[float]:
        """Prefix sums of the seconds of collectives that an OVERLAP_F_B of the table may hide, at most."""
        kinds = self.table.kinds & {Kind.F, Kind.B, Kind.I, Kind.W} if self._weaves else ()
        each = (sum(part.lines(kind).exchanged for kind in kinds) for part in self.segments.costs.stages)
        return [0.0, *accumulate(self.table.microbatches * seconds for seconds in each)]

    @cached_property
    def _weaves(self) -> bool:
        return any(action.kind is Kind.OVERLAP_F_B for _, _, action in self.table.cells())

    @property
    def _splits(self) -> bool:
        return bool(self.table.kinds & {Kind.I, Kind.W})

    def _of(self, segment: int, costs: Costs) -> float:
        """A lower bound of the seconds of one microbatch in a segment under this table."""
        part, kinds = costs.stages[segment], self.table.kinds
        if kinds.isdisjoint({Kind.B, Kind.I, Kind.W}):
            return part.forward
        whole, split = (self._least(part, each, again=True) for each in ((Kind.B,), (Kind.I, Kind.W)))
        backward = split if Kind.B not in kinds else min(whole, split) if self._splits else whole
        return part.forward * bool(kinds & {Kind.F}) + backward

    def _least(self, part: StageCosts, kinds: Collection[Kind], *, again: bool = False) -> float:
        """The least seconds of a backward that recomputes in line, or behind an R; `again`: with that R."""
        in_line = sum(map(part.of, kinds))
        if part.ahead is None or not self.table.recomputed_ahead:
            return in_line
        return min(in_line, sum(map(part.ahead.of, kinds)) + again * part.of(Kind.R))

    # ------------------------------------------------------------------------------ the search

    def _listed(self) -> tuple[Cut, bool]:
        """(best cut of those simulated in the order of their bounds, whether it is proven best)."""
        free = self._free
        cuts = (self._whole((free[0], *rest)) for rest in combinations(free[1:], self._searched - 1))
        ordered = sorted((self.bound(cut), tuple(-first for first in cut), cut) for cut in cuts)
        best, cut = (inf, inf, 0), ordered[0][2]
        for bound, _, each in ordered[: self._simulations]:
            if best[0] == 0 and bound > best[1]:
                return cut, True
            found = self.value(each)
            if found < best:
                best, cut = found, each
        return cut, len(ordered) <= self._simulations

    @property
    def _simulations(self) -> int:
        """The most cuts to simulate, both in the order of the bounds and in the local search."""
        actions = sum(1 for _ in self.table.cells())
        return max(32, _WORK // 2 // max(1, actions)) if self.most is None else self.most

    def moved(self, cut: Cut) -> Cut:
        """The local optimum that moves of starts reach from this cut."""
        best, left = self.value(cut), self._simulations
        while left > 0:
            for each in self._neighbours(cut):
                found, left = self.value(each), left - 1
                if found < best:
                    best, cut = found, each
                    break
                if left <= 0:
                    break
            else:
                break
        return cut

    def _neighbours(self, cut: Cut) -> Iterator[Cut]:
        """Cuts in which a heavy stage gives a segment to a light one, through those between; then those in which one start, or
        all from one on, move by one or two segments. The heaviest stages come first."""
        pieces = len(self.segments.starts)
        works = [self._work[end] - self._work[first] for first, end in zip(cut, [*cut[1:], pieces], strict=True)]
        order = sorted(range(len(cut)), key=lambda stage: -works[stage])
        pairs = sorted(combinations(range(len(cut)), 2), key=lambda pair: (pair[0] - pair[1], pair[0]))
        for heavy, light in ((order[one], order[other]) for one, other in pairs):
            if works[heavy] > works[light]:
                yield from self._with(cut, *_given(heavy, light))
        heaviest = sorted(range(1, len(cut)), key=lambda stage: -max(works[stage - 1], works[stage]))
        for by in (1, -1, 2, -2):
            for stage in heaviest:
                for end in (stage + 1, len(cut)):
                    yield from self._with(cut, range(stage, end), by)

    def _with(self, cut: Cut, moved: range, by: int) -> Iterator[Cut]:
        """The cut after a move of some starts, if it is one."""
        each = tuple(first + by if at in moved else first for at, first in enumerate(cut))
        if self._is_whole(each) and all(a < b for a, b in zip(each, (*each[1:], len(self.segments.starts)), strict=True)):
            yield each

    def _is_whole(self, cut: Cut) -> bool:
        before, after = self._ends
        at, end = len(before), len(cut) - len(after)
        return cut[:at] == before and cut[at] == self._free[0] and cut[end:] == after

    def _balanced(self, *, waits: bool) -> Cut:
        """The cut with the lightest heaviest stage; `waits`: include the wait for its first forward."""
        share = self.table.stages / self.table.ranks  # stages per rank: approximates a rank's work by its stage's
        each = [(self._work[at + 1] - self._work[at]) * share for at in self._free]
        found = balanced(each, self._searched, [self._fill[at] for at in self._free] if waits else None)
        return self._whole(tuple(self._free[at] for at in found))


def _given(source: int, to: int) -> tuple[range, int]:
    """The starts that move, and by how much, if one stage gives a segment to another."""
    return (range(to + 1, source + 1), 1) if source > to else (range(source + 1, to + 1), -1)


def rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}")
