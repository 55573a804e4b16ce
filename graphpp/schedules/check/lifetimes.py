"""Lifetimes on a rank as its row runs: the values of microbatches, and the state of the model.

- `LiveValues`: `start(leaf)` and `end(leaf)` are called for all parts of a row in order; `counts` has the number of each `Item`
  alive. `item_bytes` gives the bytes of an item.
- `RankState`: the same calls for all leaves whose kind is in `CHANGES_STATE`, with `make_sums(leaf)` between them if
  `makes_sums(leaf)`; `gather_layers(leaves)` for all actions if computations gather single layers. `state_bytes` gives the
  bytes of `state`.
- The activations of a stage's microbatch live from the start of its F to the end of its B, or to the end of its I and in part
  to the end of its W. A forward without a backward keeps nothing. Where an R recomputes values, its bytes live from its start
  on, and end with the B, I or W.
- A value for the neighbouring stage lives from the end of its computation until its reader starts, if both are on one rank;
  else until its SEND ends, or while its transport keeps it (`MessageFlow.kept`). On the other rank it has a buffer from the
  RECV until its reader starts. In a table without messages a value for another rank takes no bytes in between.
- Parameters of a sharded stage are whole from UNSHARD to the end of RESHARD. Its sums of gradients are allocated while its
  first B or W runs, and live until REDUCE_GRAD, or a RESHARD after a B or W. That reduction's messages, sent rows and as many
  received, live until the rank's next reduction. Parts of averages (`HeldBytes.averaged`) live to the end. A gradient waits
  until its microbatch is the next of its stage (`HeldBytes.waiting`). Computations that gather single layers take the most
  bytes of whole parameters and gradients while they run; the messages of their reduction stay.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from graphpp.schedules.table.actions import SENDS, Action, Kind, message, peer, upstream
from graphpp.schedules.table.costs import StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import HeldBytes

Item = IntEnum(
    "Item",
    "SAVED KEPT RUNS_F RUNS_B RUNS_I RUNS_W RECEIVED_F RECEIVED_B SENT_F SENT_B SENT_I "
    "AHEAD_SAVED AHEAD_KEPT RUNS_R AHEAD_RUNS_B AHEAD_RUNS_I AHEAD_RUNS_W",
    start=0,
)
"""The kinds of values of one microbatch of a stage that may be alive; the `_WITH_R` last ones if the microbatch has an R."""
_WITH_R = 6

_RUNS = {Kind.F: Item.RUNS_F, Kind.B: Item.RUNS_B, Kind.I: Item.RUNS_I, Kind.W: Item.RUNS_W}
_TAKEN = {Kind.B: Item.SAVED, Kind.I: Item.SAVED, Kind.W: Item.KEPT}  # the item that a computation reads and frees
_LEFT = {Kind.F: Item.SAVED, Kind.I: Item.KEPT}  # the item that a computation leaves behind
_IN_LINE = _RUNS, _TAKEN, _LEFT
_AHEAD = (
    {Kind.R: Item.RUNS_R, Kind.B: Item.AHEAD_RUNS_B, Kind.I: Item.AHEAD_RUNS_I, Kind.W: Item.AHEAD_RUNS_W},
    {Kind.R: Item.SAVED, Kind.B: Item.AHEAD_SAVED, Kind.I: Item.AHEAD_SAVED, Kind.W: Item.AHEAD_KEPT},
    {Kind.R: Item.AHEAD_SAVED, Kind.I: Item.AHEAD_KEPT},
)  # of a microbatch that has an R, but not of its F
_READ = {Kind.F: Item.RECEIVED_F, Kind.B: Item.RECEIVED_B, Kind.I: Item.RECEIVED_B}
_ARRIVES = {Kind.RECV_F: Item.RECEIVED_F, Kind.RECV_B: Item.RECEIVED_B}
_SENT = {Kind.F: Item.SENT_F, Kind.B: Item.SENT_B, Kind.I: Item.SENT_I}
_MESSAGES = {Item.RECEIVED_F: -1, Item.RECEIVED_B: 1, Item.SENT_F: 1, Item.SENT_B: -1, Item.SENT_I: -1}
"""Items between two stages, and the step from the stage to the other one."""
_BY_SEND = {Kind.SEND_F: (Item.SENT_F,), Kind.SEND_B: (Item.SENT_B, Item.SENT_I)}

_Value = tuple[int, Item, int | None]  # stage, item, microbatch


def item_bytes(stage: StageCosts, ahead: bool = False) -> list[int]:
    """The bytes of each `Item` of a stage; those of a microbatch with an R if `ahead`, where 0 stands for costs without any."""
    received = (stage.received_bytes.get(kind, 0) for kind in (Kind.F, Kind.B))
    sent = (stage.sent_bytes.get(kind, 0) for kind in _SENT)
    found = [stage.saved_bytes, stage.bytes_after_input_grad, *map(stage.running_bytes, _RUNS), *received, *sent]
    later = stage.ahead
    if not ahead or later is None:
        return found + [0] * ahead * _WITH_R
    recomputing = max(stage.saved_bytes, later.running_bytes(Kind.F))
    running = (later.running_bytes(kind) for kind in (Kind.B, Kind.I, Kind.W))
    return [*found, later.saved_bytes, later.bytes_after_input_grad, recomputing, *running]


class LiveValues:
    """The values on one rank. `counts`: by costs, by stage of `stages`, by item. `key`: a number that identifies the counts."""

    def __init__(self, leaves: Sequence[Action], table: Schedule, costs_of: Sequence[int], kept: int) -> None:
        """`leaves`: of the rank's row; `costs_of`: by microbatch, the number of its costs; `kept`: `MessageFlow.kept`."""
        self.stages = sorted({leaf.stage for leaf in leaves})
        self._ahead = table.recomputed_ahead
        self.items = list(Item) if self._ahead else list(Item)[:-_WITH_R]
        self._at = {stage: len(self.items) * number for number, stage in enumerate(self.stages)}
        self._costs_of, self._width = costs_of, len(self.items) * len(self.stages)
        self.counts = [0] * (self._width * (max(costs_of, default=0) + 1))
        bits = len(leaves).bit_length() + 2  # a leaf makes at most one value of an item
        self.key, self._digits = 0, [1 << bits * at for at in range(len(self.counts))]
        self._followed = {(leaf.stage, leaf.microbatch) for leaf in leaves if leaf.kind in (Kind.B, Kind.I)}
        self._table, self._rank_of, self._most, self._sends = table, table.rank_of_stage, kept, table.has_communication
        self._between = set[_Value]()
        self._by_rank: dict[int, deque[_Value]] = defaultdict(deque)  # sent values, the oldest first
        self._kept: dict[tuple[int, Kind], deque[_Value]] = {}  # the same, by stage and kind of the send

    @property
    def messages(self) -> list[bool]:
        """For each of `counts`, whether it is a message from or to another rank; all others are activations."""
        one = [item in _MESSAGES and stage + _MESSAGES[item] not in self._at for stage in self.stages for item in self.items]
        return one * (len(self.counts) // max(self._width, 1))

    def start(self, leaf: Action) -> None:
        stage, kind, microbatch, _ = leaf
        runs, taken, _ = self._roles(leaf)
        if kind in runs:
            first = self._first(stage, microbatch)
            self._take_arriving(leaf)
            if kind in taken:
                self._count(first + taken[kind], -1)
            self._count(first + runs[kind], 1)
        elif kind in _ARRIVES:
            self._add((stage, _ARRIVES[kind], microbatch), self._first(stage, microbatch) + _ARRIVES[kind])
        elif kind in SENDS:
            self._make_room(self._sent_to(leaf), self._most - 1)

    def count_as_read(self, leaf: Action, change: int) -> None:
        """Count the saved values that a computation frees as freed while it runs (`change` -1), or as alive again (1)."""
        self._count(self._first(leaf.stage, leaf.microbatch) + self._roles(leaf)[1][leaf.kind], change)

    def end(self, leaf: Action) -> None:
        stage, kind, microbatch, _ = leaf
        runs, _, left = self._roles(leaf)
        if kind in runs:
            first = self._first(stage, microbatch)
            self._count(first + runs[kind], -1)
            if kind in left and (kind is not Kind.F or (stage, microbatch) in self._followed):
                self._count(first + left[kind], 1)
            ends = message(leaf, self._table.stages)
            if ends is not None and (self._sends or ends[1].stage in self._at):
                self._add((stage, _SENT[kind], microbatch), first + _SENT[kind])
        elif kind in SENDS:
            kept = self._sent_to(leaf)
            found = ((stage, item, microbatch) for item in _BY_SEND[kind])
            kept += (value for value in found if value in self._between)
            self._make_room(kept, self._most)

    def _roles(self, leaf: Action) -> tuple[Mapping[Kind, Item], ...]:
        """By kind, the items that are alive while a computation runs, that it frees, and that it leaves behind."""
        return _AHEAD if self._ahead and leaf.kind is not Kind.F and leaf[:3:2] in self._ahead else _IN_LINE

    def _first(self, stage: int, microbatch: int | None) -> int:
        """The place in `counts` of the first item of a stage's microbatch."""
        return self._costs_of[microbatch or 0] * self._width + self._at[stage]

    def _count(self, at: int, change: int) -> None:
        self.counts[at] += change
        self.key += change * self._digits[at]

    def _add(self, value: _Value, at: int) -> None:
        self._between.add(value)
        self._count(at, 1)

    def _remove(self, value: _Value) -> None:
        if value in self._between:
            self._between.remove(value)
            stage, item, microbatch = value
            self._count(self._first(stage, microbatch) + item, -1)

    def _take_arriving(self, reader: Action) -> None:
        """Count values from a neighbouring stage as the reader's from its start on."""
        for maker in upstream(reader, self._table.stages):
            if maker.stage in self._at:
                self._remove((maker.stage, _SENT[maker.kind], maker.microbatch))
        if reader.kind in _READ:
            self._remove((reader.stage, _READ[reader.kind], reader.microbatch))

    def _make_room(self, kept: deque[_Value], most: int) -> None:
        """Drop the oldest values sent to a rank, until at most `most` are left."""
        while len(kept) > max(most, 0):
            self._remove(kept.popleft())

    def _sent_to(self, send: Action) -> deque[_Value]:
        """The values sent to the rank that receives this message, the oldest first."""
        found = self._kept.get(send[:2])
        if found is None:
            found = self._kept[send[:2]] = self._by_rank[self._rank_of[peer(send).stage]]
        return found


KINDS = ("weights", "gradients", "messages")
"""The kinds of bytes that a state has."""

_GRADIENTS = (Kind.B, Kind.W)
CHANGES_STATE = frozenset({*_GRADIENTS, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""The kinds of all leaves whose start or end changes a state."""
_IN_MESSAGES = 2  # a reduction has the bytes that it sends, and as many received

Running = tuple[tuple[int, Kind], ...]
"""Computations that gather single layers, by stage and kind."""


class State(NamedTuple):
    """The whole parameters and the gradients on a rank.

    `whole`: the stages with whole parameters; `unreduced`: stages with gradients not reduced yet; `reduced`: reduced stages,
    and computations that reduced single layers, latest first. `early`: by stage, how many microbatches have gradients that wait
    for their turn. `layers`: the running computations that gather single layers.
    """

    whole: frozenset[int] = frozenset()
    unreduced: frozenset[int] = frozenset()
    reduced: tuple[int | Running, ...] = ()
    early: tuple[tuple[int, int], ...] = ()
    layers: Running = ()


class RankState:
    def __init__(self) -> None:
        self.state = State()
        self._turn, self._early = Counter[int](), defaultdict[int, set[int | None]](set)  # microbatches, by stage

    def start(self, leaf: Action) -> None:
        state = self.state
        if leaf.kind in _GRADIENTS:
            if leaf.microbatch != self._turn[leaf.stage]:
                self._early[leaf.stage].add(leaf.microbatch)
                self._count_early()
        elif leaf.kind is Kind.UNSHARD:
            self.state = state._replace(whole=state.whole | {leaf.stage})
        elif leaf.kind in (Kind.RESHARD, Kind.REDUCE_GRAD) and leaf.stage in state.unreduced:
            self.state = state._replace(unreduced=state.unreduced - {leaf.stage}, reduced=_first(leaf.stage, state.reduced))

    def makes_sums(self, leaf: Action) -> bool:
        """Whether an action is the first that makes gradients of its stage since their reduction."""
        return leaf.kind in _GRADIENTS and leaf.stage not in self.state.unreduced

    def make_sums(self, leaf: Action) -> None:
        """Count the sums of the action's stage as allocated."""
        self.state = self.state._replace(unreduced=self.state.unreduced | {leaf.stage})

    def end(self, leaf: Action) -> None:
        if leaf.kind is Kind.RESHARD:
            self.state = self.state._replace(whole=self.state.whole - {leaf.stage})
        elif leaf.kind in _GRADIENTS and leaf.microbatch == self._turn[leaf.stage]:
            self._turn[leaf.stage] += 1
            early = self._early[leaf.stage]
            while self._turn[leaf.stage] in early:
                early.remove(self._turn[leaf.stage])
                self._turn[leaf.stage] += 1
            self._count_early()

    def gather_layers(self, leaves: Sequence[Action]) -> None:
        """The previous computations have ended, and these leaves gather their layers now."""
        running = tuple((leaf.stage, leaf.kind) for leaf in leaves if leaf.is_compute)
        reduced = _first(running, self.state.reduced) if running else self.state.reduced
        self.state = self.state._replace(layers=running, reduced=reduced)

    def _count_early(self) -> None:
        early = tuple(sorted((stage, len(microbatches)) for stage, microbatches in self._early.items() if microbatches))
        if early != self.state.early:
            self.state = self.state._replace(early=early)


def _first(last: int | Running, others: tuple[int | Running, ...]) -> tuple[int | Running, ...]:
    return (last, *(each for each in others if each != last))


def state_bytes(state: State, held: HeldBytes) -> tuple[int, int, int]:
    """The bytes of a state, by `KINDS`."""
    running = [held.layers[key] for key in state.layers if key in held.layers]  # parts of an action run one after the other
    whole = sum(nbytes for stages, nbytes in held.whole if not stages.isdisjoint(state.whole))
    whole += max((each.whole for each in running), default=0)
    gradients = sum(held.gradients.get(stage, 0) for stage in state.unreduced)
    gradients += max((each.gradients for each in running), default=0)
    gradients += sum(count * held.waiting.get(stage, 0) for stage, count in state.early)
    sent = next((nbytes for last in state.reduced if (nbytes := _sent(last, held)) is not None), 0)
    averaged = sum(held.averaged.get(last, 0) for last in state.reduced if isinstance(last, int)) if held.averaged else 0
    return whole, gradients, _IN_MESSAGES * sent + averaged


def _sent(last: int | Running, held: HeldBytes) -> int | None:
    """The bytes that a reduction sends: of a stage, or of the largest layer of computations; None if nothing is reduced."""
    if isinstance(last, int):
        return held.sent.get(last, held.gradients[last]) if last in held.gradients else None
    return max((held.layers[key].sent for key in last if key in held.layers), default=0) or None
