"""The state of the model on a rank as its row runs: whole parameters, sums of gradients, gradients on their way.

Contract
    `start(leaf)` and `end(leaf)` are called for all leaves of a row in order whose kind is in `CHANGES_STATE`; between the two
    calls `make_sums(leaf)`, if `makes_sums(leaf)`; `gather_layers(leaves)` for all actions where computations gather single
    layers. `state` is the rank's state then, and `state_bytes` gives the bytes of a state.

Parameters of a sharded stage are whole from UNSHARD to the end of RESHARD. Its sums of gradients are made while its first B or
W runs, and stand until REDUCE_GRAD, or a RESHARD that follows a B or W. The messages of that reduction, rows that leave and as
many that arrive, stay until the rank's next reduction. Parts of averages (`HeldBytes.averaged`) stay to the end. A gradient
whose microbatch is not the next one of its stage waits (`HeldBytes.waiting`). Computations that gather single layers hold the
most of whole parameters and gradients while they run, and leave the messages of a reduction behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.state_bytes import HeldBytes

KINDS = ("weights", "gradients", "messages")
"""The kinds of bytes that a state has."""

_GRADIENTS = (Kind.B, Kind.W)
CHANGES_STATE = frozenset({*_GRADIENTS, Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD})
"""The kinds of all leaves whose start or end changes a state."""
_IN_MESSAGES = 2  # a reduction holds the bytes that it sends, and receives as many

Running = tuple[tuple[int, Kind], ...]
"""Computations that gather single layers, by stage and kind."""


class State(NamedTuple):
    """The whole parameters and the gradients on a rank.

    `whole`: the stages with whole parameters; `unreduced`: those with gradients that are not reduced; `reduced`: those that
    were reduced, and computations that reduced single layers, the last ones first. `early`: by stage, how many microbatches
    have gradients that wait for their turn. `layers`: the computations that gather single layers now.
    """

    whole: frozenset[int] = frozenset()
    unreduced: frozenset[int] = frozenset()
    reduced: tuple[int | Running, ...] = ()
    early: tuple[tuple[int, int], ...] = ()
    layers: Running = ()


class RankState:
    """The state of one rank."""

    def __init__(self) -> None:
        self.state = State()
        self._turn, self._early = Counter[int](), defaultdict[int, set[int | None]](set)  # microbatches, by stage

    def start(self, leaf: Action) -> None:
        """An action starts, or a part of one."""
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
        """The sums of the stage of an action are there."""
        self.state = self.state._replace(unreduced=self.state.unreduced | {leaf.stage})

    def end(self, leaf: Action) -> None:
        """An action ends."""
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
        """These gather their layers now, and those before have ended."""
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
    """The bytes that come and go, by `KINDS`."""
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
    """The bytes that a reduction sends: of a stage, or of the largest layer of computations; None: there was none."""
    if isinstance(last, int):
        return held.sent.get(last, held.gradients[last]) if last in held.gradients else None
    return max((held.layers[key].sent for key in last if key in held.layers), default=0) or None
