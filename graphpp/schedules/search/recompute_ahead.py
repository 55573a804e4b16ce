"""Move recomputation out of backwards: an R where a rank waits, so that the rank recomputes meanwhile.

- In: a table whose pairs (stage, microbatch) recompute within their B or I: those of `Schedule.recomputed`, or all if that is
  None. Costs with `StageCosts.ahead` for the stages whose pairs may get an R.
- Out: the table with Rs; all other actions keep their order. The simulated step takes no longer, and no rank exceeds its cap.
  The result depends on the arguments alone.
- Method: first every backward gets an R directly before it, and keeps it if the rank waits for the backward's input. Then Rs
  move ahead into earlier waits into which they fit, as long as the step gets shorter; a move without which the step is as short
  is undone, because values live from their R on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from graphpp.arguments import checked
from graphpp.errors import ScheduleError
from graphpp.schedules.check.step_memory import peak_bytes, step_totals
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.search.arguments import caps_of
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import PER_STAGE, Action, Kind, message, upstream
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import SCHEDULE, Row, Schedule

_BACKWARD = (Kind.B, Kind.I)
_RECEIVES = (Kind.RECV_F, Kind.RECV_B)
_MORE = 1 + 1e-9  # a longer time differs by more than rounding
_ROUNDS = 8
_PARTS = 16  # a round's moves are refused or undone in so many parts, else a table of a thousand forwards takes minutes
_WINDOW = 8  # computations over which an R may move ahead in one round

Pair = tuple[int, int]
Anchors = Mapping[Pair, Action]
"""The R of a pair (stage, microbatch) stands directly before this action of its rank."""
Times = Mapping[Action, tuple[float, float]]


@checked(ScheduleError, schedule=SCHEDULE, costs=COSTS)
def recompute_ahead(schedule: Schedule, costs: Costs, memory_cap: int | Sequence[int] | None = None) -> Schedule:
    """The table with an R where a rank waits; the table itself if no R makes the step shorter. With `costs.blocking` the table
    gets its sends and receives.

    `memory_cap`: the most bytes of activations and messages on a rank, for all ranks or one for each. Raises `ScheduleError` if
    the table exceeds it already, has UNSHARDs (`graphpp.compile` adds them later), or cannot run, and if no costs have `ahead`.
    """
    if any(action.kind in PER_STAGE for _, _, action in schedule.cells()):
        raise ScheduleError(f"{schedule.name}: place recomputations first, then the UNSHARDs and reductions of shards")
    if all(stage.ahead is None for stage in costs.stages):
        raise ScheduleError("costs: no stage has the times and bytes of an R: give StageCosts.ahead")
    if costs.blocking and not schedule.has_communication:  # so that Rs stand before the receives that a rank waits in
        schedule = add_send_recv(schedule)
    caps = caps_of(memory_cap, schedule.ranks)
    for rank, (peak, cap) in enumerate(zip(peak_bytes(schedule, costs), caps, strict=True)):
        if peak > cap:
            raise ScheduleError(f"memory_cap: rank {rank} of {schedule.name!r} needs {peak:,} bytes without an R: give more")
    rows = _Rows(schedule, costs, caps)
    anchors = rows.in_earlier_waits(rows.before_backwards())
    return rows.with_ahead(anchors) if rows.seconds(anchors) * _MORE < rows.seconds({}) else schedule


@dataclass(frozen=True)
class _Rows:
    """The rows of a table, to which Rs are added. `backwards`: by pair, the action with the B or I that may get an R."""

    table: Schedule
    costs: Costs
    caps: Sequence[float]
    computed: list[list[Action]] = field(default_factory=list)
    place: dict[Action, int] = field(default_factory=dict)
    backwards: dict[Pair, Action] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.table.table:
            self.computed.append([action for action in row if action is not None and action.is_compute])
            for at, action in enumerate(self.computed[-1]):
                self.place.update(dict.fromkeys(action.leaves, at))
                self.backwards.update({_pair(leaf): action for leaf in action.leaves if self._may_move(leaf)})

    def _may_move(self, leaf: Action) -> bool:
        """Whether a leaf is a backward that recomputes, and an R takes some time and makes the backward shorter."""
        stage, given = self.costs.stages[leaf.stage], self.table
        recomputes = given.recomputed is None or _pair(leaf) in given.recomputed
        if leaf.kind not in _BACKWARD or not recomputes or _pair(leaf) in given.recomputed_ahead or stage.ahead is None:
            return False
        return stage.of(Kind.R) > 0 and self._longer(leaf) < stage.of(Kind.R)

    def _longer(self, leaf: Action) -> float:
        """By how much the R and the backward together take longer than the backward that recomputes itself."""
        stage, kinds = self.costs.stages[leaf.stage], (Kind.B,) if leaf.kind is Kind.B else (Kind.I, Kind.W)
        before, after = (sum(stage.of(kind, ahead) for kind in kinds) for ahead in (False, True))
        return stage.of(Kind.R) + after - before

    def with_ahead(self, anchors: Anchors) -> Schedule:
        before: dict[Action, list[Action]] = defaultdict(list)
        for (stage, microbatch), anchor in anchors.items():
            before[anchor].append(_r((stage, microbatch)))
        ranks = {self.table.rank_of_stage[stage] for stage, _ in anchors}
        rows = (_with(row, before) if rank in ranks else row for rank, row in enumerate(self.table.table))
        return replace(self.table, table=tuple(rows))

    def seconds(self, anchors: Anchors) -> float:
        return simulate(self.with_ahead(anchors), self.costs).makespan

    def _times(self, anchors: Anchors) -> Times:
        events = simulate(self.with_ahead(anchors), self.costs).events
        return {leaf: (event.start, event.end) for event in events for leaf in event.action.leaves}

    def before_backwards(self) -> Anchors:
        times = self._times(self.backwards)
        waited = []
        for pair, action in self.backwards.items():
            longer = max(self._longer(leaf) for leaf in action.leaves if leaf.kind in _BACKWARD and _pair(leaf) == pair)
            if self._arrival(action, times) > (times[_r(pair)][0] + max(0.0, longer)) * _MORE:
                waited.append(pair)
        return self._within_caps({}, {pair: self.backwards[pair] for pair in reversed(waited)})  # waits are longest at the end

    def _arrival(self, action: Action, times: Times) -> float:
        """The time at which the last input of an action from another stage arrives."""
        found, costs = 0.0, self.costs
        for leaf in action.leaves:
            for maker in (each for each in upstream(leaf, self.table.stages) if each in times):
                found = max(found, times[maker][1])
                ends, home = message(maker, self.table.stages), self.table.rank_of_stage
                if ends is not None and home[leaf.stage] != home[maker.stage]:
                    sends = costs.sends_forward if leaf.kind is Kind.F else costs.sends_backward
                    began = times[ends[0]][0] if ends[0] in times else found
                    found = max(found, began + costs.message(sends, min(leaf.stage, maker.stage)))
        return found

    def in_earlier_waits(self, anchors: Anchors) -> Anchors:
        best = self.seconds(anchors)
        for _ in range(_ROUNDS):
            moves = self._moves(anchors, self._times(anchors))
            moved = self._within_caps(anchors, moves)
            now = self.seconds(moved)
            if now * _MORE >= best:
                break
            changed = {pair: moved[pair] for pair in moves if moved.get(pair) != anchors.get(pair)}
            best, anchors = now, {**anchors, **self._needed(anchors, changed, now * _MORE, len(changed) // _PARTS)}
        return anchors

    def _moves(self, anchors: Anchors, times: Times) -> Anchors:
        """Into each wait the Rs of the backwards that follow soon, as far as they fit."""
        found: dict[Pair, Action] = {}
        until = {anchor: times[_r(pair)][1] for pair, anchor in anchors.items()}  # the end of the last R before an action
        behind = {pair: self.place[anchor.leaves[0]] for pair, anchor in anchors.items()}
        for row in self.computed:
            free = 0.0
            for at, action in enumerate(row):
                start, end = times[action.leaves[0]]
                left, free = start - max(free, until.get(action, 0.0)), end
                for leaf in (leaf for later in row[at + 1 : at + 1 + _WINDOW] for leaf in later.leaves if left > 0):
                    pair = _pair(leaf)
                    may_move = leaf.kind in _BACKWARD and pair in self.backwards and pair not in found
                    if may_move and self.place[leaf._replace(kind=Kind.F)] < at < behind.get(pair, inf):
                        seconds = self.costs.stages[leaf.stage].of(Kind.R)
                        if seconds <= left * _MORE:
                            found[pair], left = action, left - seconds
        return found

    def _within_caps(self, anchors: Anchors, moves: Anchors) -> Anchors:
        """The anchors with as many of the moves, in order, as the caps admit."""
        ranks: dict[int, dict[Pair, Action]] = defaultdict(dict)
        for (stage, microbatch), anchor in moves.items():
            ranks[self.table.rank_of_stage[stage]][stage, microbatch] = anchor
        for rank, own in ranks.items():
            anchors = self._admitted(rank, anchors, own, len(own) // _PARTS)
        return anchors

    def _admitted(self, rank: int, anchors: Anchors, moves: Anchors, few: int) -> Anchors:
        """`few` moves are admitted or refused together."""
        if self._fits(rank, together := {**anchors, **moves}):
            return together
        for part in _halves(moves) if len(moves) > max(1, few) else ():
            anchors = self._admitted(rank, anchors, part, few)
        return anchors

    def _fits(self, rank: int, anchors: Anchors) -> bool:
        cap = self.caps[rank]
        own = {pair: anchor for pair, anchor in anchors.items() if self.table.rank_of_stage[pair[0]] == rank}
        return cap == inf or max(step_totals(self.with_ahead(own), rank, self.costs)) <= cap

    def _needed(self, anchors: Anchors, moves: Anchors, most: float, few: int) -> Anchors:
        """The moves without those that a step of `most` seconds does not need; `few` moves stay or go together."""
        if not moves or self.seconds(anchors) <= most:
            return {}
        if len(moves) <= max(1, few):
            return moves
        first, second = _halves(moves)
        kept = self._needed({**anchors, **second}, first, most, few)
        return {**kept, **self._needed({**anchors, **kept}, second, most, few)}


def _halves(moves: Anchors) -> tuple[Anchors, Anchors]:
    pairs, half = list(moves.items()), len(moves) // 2
    return dict(pairs[:half]), dict(pairs[half:])


def _pair(leaf: Action) -> Pair:
    return leaf.stage, leaf.microbatch or 0


def _r(pair: Pair) -> Action:
    return Action(pair[0], Kind.R, pair[1])


def _with(row: Row, before: Mapping[Action, Sequence[Action]]) -> Row:
    """The row with the Rs before each action, and before the receives directly in front of it; without idle cells."""
    found: list[Action] = []
    for action in (each for each in row if each is not None):
        at = len(found)
        while at and action in before and found[at - 1].kind in _RECEIVES:
            at -= 1
        found[at:at] = before.get(action, ())
        found.append(action)
    return tuple(found)
