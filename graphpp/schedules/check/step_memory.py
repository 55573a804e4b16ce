"""The peak of all bytes on each rank in a step: parameters, gradients, optimizer, buffers, activations, from the table alone.

Contract
--------
    in    the table that the ranks run (sharded stages have UNSHARD, RESHARD and REDUCE_GRAD), the costs of its microbatches,
          the state that each rank holds (`table/state_bytes.py`; none: activations alone)
    out   for each rank the column at which most bytes are alive together, and these bytes by kind

Each row is walked once. Parameters of a sharded stage are whole from UNSHARD to the end of RESHARD; its sums of gradients stand
from its first B or W until REDUCE_GRAD, or a RESHARD that follows a B or W. The messages of that reduction, the rows that are
sent and as many that arrive, stay until the rank's next reduction, by which they are taken to have ended. A gradient whose
microbatch is not the next one of its stage waits beside the sums (`HeldBytes.waiting`). The finish of the gradients counts
at the last column. Lifetimes of activations are those of `peak_memory.py`. Computations that gather single layers hold the most
of whole parameters and of whole gradients while they run, and leave the messages of a reduction behind.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graphpp.errors import ScheduleError
from graphpp.schedules.check.peak_memory import MicrobatchCosts, live_activations
from graphpp.schedules.check.schedule_under_check import Position, ScheduleUnderCheck
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.schedule import Row, Schedule
from graphpp.schedules.table.state_bytes import HeldBytes, LayerBytes

CHANGING = ("weights", "gradients", "messages")
IN_MESSAGES = 2  # a reduction holds the bytes that it sends, and receives as many


class StepPeak(NamedTuple):
    """The most bytes alive at once on a rank: the first column with so many, and the bytes by kind there.

    `most`: by kind, the most bytes at any time before the finish of the gradients, not all at the same time.
    """

    rank: int
    column: int
    parts: Mapping[str, int]
    most: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """All bytes at the peak."""
        return sum(self.parts.values())


def step_peaks(
    table: Schedule, costs: MicrobatchCosts, held: Sequence[HeldBytes] = (), offloaded: Sequence[OffloadWindow] = ()
) -> tuple[StepPeak, ...]:
    """The peak of each rank.

    Raises `ScheduleError` if `costs` has another number of stages or microbatches, or `held` of ranks.
    """
    state, activations = _held_by_ranks(table, held), live_activations(table, costs, offloaded)
    return tuple(
        _peak(rank, row, live, own)
        for rank, (row, live, own) in enumerate(zip(table.table, activations, state, strict=True))
    )


def step_bytes(
    table: Schedule, costs: MicrobatchCosts, held: Sequence[HeldBytes] = (), offloaded: Sequence[OffloadWindow] = ()
) -> tuple[Iterator[tuple[int, dict[str, int]]], ...]:
    """For each rank (column, bytes by kind) before the row, while each action runs and after it, and in the finish.

    The most bytes together are those of `step_peaks`, whose errors it raises.
    """
    state, activations = _held_by_ranks(table, held), live_activations(table, costs, offloaded)
    return tuple(_bytes(*each) for each in zip(table.table, activations, state, strict=True))


def check_memory(
    subject: ScheduleUnderCheck,
    costs: MicrobatchCosts,
    cap: int | Sequence[int],
    offloaded: Sequence[OffloadWindow] = (),
    held: Sequence[HeldBytes] = (),
) -> None:
    """Raise `ScheduleError` at the peak of a rank with more than `cap` bytes alive; `cap`: for all ranks, or one for each."""
    caps = [cap] * subject.schedule.ranks if isinstance(cap, int) else list(cap)
    if len(caps) != subject.schedule.ranks:
        raise ScheduleError(f"memory_cap has bytes for {len(caps)} ranks, but {subject.schedule.ranks} run the schedule")
    for peak, most in zip(step_peaks(subject.schedule, costs, held, offloaded), caps, strict=True):
        if peak.nbytes > most:
            what = f"{_spelled(peak)}, more than the cap of {most:,}"
            raise subject.refusal(Position(peak.rank, peak.column), what, _remedy(peak))


def _spelled(peak: StepPeak) -> str:
    """`5 bytes are alive here (2 of weights, 3 of activations)`; of one kind alone: `3 bytes of activations are alive here`."""
    parts = {kind: nbytes for kind, nbytes in peak.parts.items() if nbytes}
    if len(parts) == 1:
        return f"{peak.nbytes:,} bytes of {next(iter(parts))} are alive here"
    return f"{peak.nbytes:,} bytes are alive here ({', '.join(f'{nbytes:,} of {kind}' for kind, nbytes in parts.items())})"


def _remedy(peak: StepPeak) -> str:
    """What would take fewer bytes: of the activations, and of the state where there is any."""
    order = "run a backward, or a held back W, earlier, or forwards later, or recompute in these stages"
    if not any(nbytes for kind, nbytes in peak.parts.items() if kind != "activations"):
        return order
    return (
        "for fewer activations take another schedule (V-Min, 1F1B), recompute (memory.recompute) or smaller microbatches; for "
        "fewer weights and gradients more stages on more ranks, or shards (dp_shard) with a smaller parallel.keep; if the "
        "optimizer keeps other bytes, say so in memory.optimizer"
    )


def _held_by_ranks(table: Schedule, held: Sequence[HeldBytes]) -> Sequence[HeldBytes]:
    if held and len(held) != table.ranks:
        raise ScheduleError(f"held has the bytes of {len(held)} ranks, but {table.ranks} run {table.name!r}: give one for each")
    return held or [HeldBytes()] * table.ranks


class _StateNow:
    """The bytes of state that come and go on one rank: `now`, and the `most` of each kind so far, by `CHANGING`."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._stages, self._unreduced, self._messages = set[int](), set[int](), 0
        self._turn, self._early = Counter[int](), defaultdict[int, set[int]](set)  # microbatches, by stage
        self._layers: list[LayerBytes] = []  # of the computations that run now
        self.now = self.most = (0, 0, 0)

    def moments(self, row: Row, live: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """(column, bytes of activations) while each action of the row runs and after it; this object has the state then."""
        for column, action in enumerate(row):
            leaves = action.leaves if action is not None else ()
            for leaf in leaves:
                self._before(leaf)
            self._compute(leaves)
            yield next(live)
            for leaf in leaves:
                self._after(leaf)
            self._compute(())
            yield column, next(live)[1]

    def parts(self, activations: int) -> dict[str, int]:
        """All bytes alive, by kind."""
        found = dict(self._held.standing)
        for kind, nbytes in zip(CHANGING, self.now, strict=True):
            found[kind] = found.get(kind, 0) + nbytes
        return found | {"activations": activations}

    def at_end(self) -> dict[str, int]:
        """All bytes alive while the gradients of the step are finished, by kind."""
        found = self.parts(0)
        found["gradients"] += self._held.at_end
        return found

    def _before(self, leaf: Action) -> None:
        """Take the bytes of an action that starts."""
        if leaf.kind is Kind.UNSHARD:
            self._stages.add(leaf.stage)
        elif leaf.kind in (Kind.B, Kind.W):
            self._unreduced.update({leaf.stage} & self._held.gradients.keys())
            if leaf.microbatch != self._turn[leaf.stage]:
                self._early[leaf.stage].add(leaf.microbatch or 0)
        elif leaf.kind in (Kind.RESHARD, Kind.REDUCE_GRAD) and leaf.stage in self._unreduced:
            self._unreduced.remove(leaf.stage)
            self._messages = IN_MESSAGES * self._held.sent.get(leaf.stage, self._held.gradients[leaf.stage])
        else:
            return
        self._count()

    def _compute(self, leaves: Sequence[Action]) -> None:
        """Take the bytes of single layers while these computations run, and give back those of the ones before."""
        running = [self._held.layers[key] for leaf in leaves if (key := (leaf.stage, leaf.kind)) in self._held.layers]
        if running or self._layers:
            self._layers = running
            sent = max((each.sent for each in running), default=0)
            self._messages = IN_MESSAGES * sent if sent else self._messages
            self._count()

    def _after(self, leaf: Action) -> None:
        """Give back the bytes that an action frees when it ends."""
        if leaf.kind is Kind.RESHARD:
            self._stages.discard(leaf.stage)
        elif leaf.kind in (Kind.B, Kind.W) and leaf.microbatch == self._turn[leaf.stage]:
            self._turn[leaf.stage] += 1
            while self._turn[leaf.stage] in self._early[leaf.stage]:
                self._early[leaf.stage].remove(self._turn[leaf.stage])
                self._turn[leaf.stage] += 1
        else:
            return
        self._count()

    def _count(self) -> None:
        whole = sum(nbytes for stages, nbytes in self._held.whole if not stages.isdisjoint(self._stages))
        whole += max((each.whole for each in self._layers), default=0)  # parts of one action run one after the other
        gradients = sum(self._held.gradients[stage] for stage in self._unreduced)
        gradients += max((each.gradients for each in self._layers), default=0)
        gradients += sum(len(early) * self._held.waiting.get(stage, 0) for stage, early in self._early.items())
        self.now = whole, gradients, self._messages
        self.most = tuple(map(max, self.most, self.now))  # type: ignore[assignment]


def _bytes(row: Row, live: Iterator[tuple[int, int]], held: HeldBytes) -> Iterator[tuple[int, dict[str, int]]]:
    state = _StateNow(held)
    yield 0, state.parts(0)
    for column, activations in state.moments(row, live):
        yield column, state.parts(activations)
    yield max(len(row) - 1, 0), state.at_end()


def _peak(rank: int, row: Row, live: Iterator[tuple[int, int]], held: HeldBytes) -> StepPeak:
    state, standing = _StateNow(held), sum(held.standing.values())
    at, parts, largest, most = 0, state.parts(0), standing, 0
    for column, activations in state.moments(row, live) if held.changes else live:
        most = max(most, activations)
        total = standing + sum(state.now) + activations
        if total > largest:
            at, parts, largest = column, state.parts(activations), total
    end = state.at_end()
    if sum(end.values()) > largest:
        at, parts = max(len(row) - 1, 0), end
    found = {**dict(zip(CHANGING, state.most, strict=True)), "activations": most}
    return StepPeak(rank, at, parts, {kind: held.standing.get(kind, 0) + found.get(kind, 0) for kind in parts})
