"""Tables to test with: named ones of any size, random legal ones, and a machine that runs them step by step.

The machine shares no code with the checker or the rewrites: it runs the ranks, and a message moves only when both of its
ends are at the heads of their ranks' queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from hypothesis import strategies as st

from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import VERBS, batch_p2p
from graphpp.schedules.table.actions import SENDS, Action, Kind
from graphpp.schedules.table.schedule import Schedule

Rows = list[list[Action]]


def rows_of(schedule: Schedule) -> Rows:
    """The rows without idle cells."""
    return [[action for action in row if action] for row in schedule.table]


ONE_PER_RANK = ("GPipe", "1F1B", "ZB1P", "ZB2P")
ON_A_V = ("ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min")
TRAINING = sorted(set(SCHEDULES) - {"ForwardOnly"})


def admitted(ranks: int, microbatches: int) -> bool:
    """True if Interleaved1F1B and InterleavedZeroBubble accept these counts."""
    return microbatches % max(1, microbatches // ranks) == 0


@st.composite
def named(draw: st.DrawFn) -> Schedule:
    """Any named schedule for training, at any size that it accepts."""
    name = draw(st.sampled_from(TRAINING))
    ranks, local, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 13))
    if (ranks > 1 and name in ONE_PER_RANK) or name in ON_A_V:
        local = 2 if name in ON_A_V else 1
    if name == "DualPipeV":
        microbatches += 2 * ranks - 1
    if name.startswith("Interleaved") or (name == "auto" and ranks > 1 and local > 1):
        microbatches = next(count for count in range(microbatches, 0, -1) if admitted(ranks, count))
    return make_table(name, ranks, ranks * local, microbatches)


def random_rows(random: Random, ranks: int, stages: int, microbatches: int) -> Rows:
    """A random legal table: any stage on any rank, B or I and W, any order that the data flow allows."""
    home = [*range(ranks), *(random.randrange(ranks) for _ in range(stages - ranks))]
    random.shuffle(home)
    chains: list[list[Action]] = []
    for m in range(microbatches):
        split = {stage: random.random() < 0.5 for stage in range(stages)}
        chains.append([Action(stage, Kind.F, m) for stage in range(stages)])
        for stage in reversed(range(stages)):
            chains[-1] += [Action(stage, Kind.I, m), Action(stage, Kind.W, m)] if split[stage] else [
                Action(stage, Kind.B, m)
            ]  # fmt: skip
    rows: Rows = [[] for _ in range(ranks)]
    while any(chains):
        chain = random.choice([chain for chain in chains if chain])
        late = random.random() < 0.3 and chain[0].kind is Kind.W and len(chain) > 1
        action = chain.pop(0)
        rows[home[action.stage]].append(action)
        if late:  # a weight gradient may stand anywhere after its input gradient
            row = rows[home[action.stage]]
            row.insert(random.randint(row.index(action._replace(kind=Kind.I)) + 1, len(row) - 1), row.pop())
    return rows


def overlap_some(random: Random, rows: Rows, stages: int) -> None:
    """Join two adjacent computations of a rank into one overlap, if the table still runs."""
    row = random.choice(rows)
    at = random.randrange(max(1, len(row) - 1))
    pair = row[at : at + 2]
    if len(pair) == 2 and not any(action.parts or action.kind is Kind.R for action in pair):
        row[at : at + 2] = [Action(-1, Kind.OVERLAP_F_B, None, tuple(pair))]
        if not Machine(rows, stages).runs_to_its_end():
            row[at : at + 1] = pair


def recompute_some(rows: Rows) -> None:
    """Insert an R for some backwards, anywhere between their forward and them."""
    draw = Random(str(rows))  # more draws of Hypothesis would make it discard large tables
    for row in rows:
        for backward in [action for action in row if action.kind in (Kind.B, Kind.I) and draw.random() < 0.2]:
            first = row.index(backward._replace(kind=Kind.F))
            row.insert(draw.randint(first + 1, row.index(backward)), backward._replace(kind=Kind.R))


def sharded(random: Random, rows: Rows) -> None:
    """Insert UNSHARD, RESHARD and REDUCE_GRAD for some stages; parameters stay unsharded over runs of random length."""
    for row in rows:
        for stage in sorted({leaf.stage for action in row for leaf in action.leaves if leaf.is_compute}):
            at = [n for n, a in enumerate(row) if any(leaf.is_compute and leaf.stage == stage for leaf in a.leaves)]
            if random.random() < 0.5:
                row.insert(random.randint(at[-1] + 1, len(row)), Action(stage, Kind.REDUCE_GRAD))
            if random.random() < 0.5:
                breaks = sorted(random.sample(at[1:], random.randint(0, min(2, len(at) - 1))))
                for here in reversed(breaks):
                    row[here:here] = [Action(stage, Kind.RESHARD), Action(stage, Kind.UNSHARD)]
                last = at[-1] + 2 * len(breaks)
                row.insert(random.randint(last + 1, len(row)), Action(stage, Kind.RESHARD))
                row.insert(random.randint(0, at[0]), Action(stage, Kind.UNSHARD))


def legal_rows(random: Random, ranks: int, sharding: bool = True) -> tuple[Rows, int, int]:
    """Rows of a legal table, its stages and microbatches: computations, with messages, or in batches, sharded or not."""
    stages, microbatches = ranks + random.randint(0, 3), random.randint(1, 4)
    return rows_for(random, ranks, stages, microbatches, sharding), stages, microbatches


def rows_for(random: Random, ranks: int, stages: int, microbatches: int, sharding: bool) -> Rows:
    """Like `legal_rows`, for given numbers."""
    rows = random_rows(random, ranks, stages, microbatches)
    recompute_some(rows)
    for _ in range(random.choice([0, 0, 3])):
        overlap_some(random, rows, stages)
    form = random.choice(["computations", "messages", "batches"])
    if form != "computations":
        made = add_send_recv(Schedule.of(rows, stages=stages, microbatches=microbatches))
        if form == "batches":
            made = batch_p2p(made, random.sample(sorted(VERBS), random.randint(1, 3)))
        rows = rows_of(made)
    if sharding and random.random() < 0.5:
        sharded(random, rows)
    return rows


@st.composite
def tables(draw: st.DrawFn, sharding: bool = True) -> tuple[Rows, int, int, Random]:
    """Rows of a legal table, its stages and microbatches, and a source of randomness."""
    random = draw(st.randoms(use_true_random=False))
    return *legal_rows(random, draw(st.integers(1, 4)), sharding), random


@dataclass
class Batch:
    """Messages that a rank posted in one call, or a single message; the batch ends when none of them is in flight."""

    parts: tuple[Action, ...]
    under_way: list[Action]


class Machine:
    """Runs the ranks of a complete table, one batch of messages in flight per rank.

    A message moves when both of its ends are in the batches in flight on their ranks, each the first of its channel there; the
    received value can be read when the receiver's batch has ended.
    """

    def __init__(self, rows: Rows, stages: int) -> None:
        self.stages = stages
        self.home = {leaf.stage: rank for rank, row in enumerate(rows) for action in row for leaf in action.leaves}
        self.again = {(action.stage, action.microbatch) for row in rows for action in row if action.kind is Kind.R}
        self.communicates = any(action.is_communication for row in rows for action in row)
        self.todo, self.queues = [deque(row) for row in rows], [deque[Batch]() for _ in rows]
        self.done: set[tuple[str, int, int | None]] = set()  # computed or received; an I counts as a B

    def runs_to_its_end(self) -> bool:
        while any([self.step(rank) or self.deliver(rank) for rank in range(len(self.todo))]):
            pass
        return not any(self.todo) and not any(self.queues)

    def needs(self, leaf: Action) -> Iterator[tuple[str, int]]:
        stage = leaf.stage
        if leaf.kind in (Kind.B, Kind.I, Kind.W, Kind.R, Kind.SEND_F):
            yield "F", stage
        if leaf.kind in (Kind.B, Kind.I) and (stage, leaf.microbatch) in self.again:
            yield "R", stage
        if leaf.kind in (Kind.W, Kind.SEND_B):
            yield "B", stage
        if leaf.kind is Kind.F and stage > 0:
            yield ("RECV_F", stage) if self.remote(stage, stage - 1) else ("F", stage - 1)
        if leaf.kind in (Kind.B, Kind.I) and stage < self.stages - 1:
            yield ("RECV_B", stage) if self.remote(stage, stage + 1) else ("B", stage + 1)

    def remote(self, stage: int, other: int) -> bool:
        return self.communicates and self.home[stage] != self.home[other]

    def step(self, rank: int) -> bool:
        action = self.todo[rank][0] if self.todo[rank] else None
        if action is None:
            return False
        if any((*need, leaf.microbatch) not in self.done for leaf in action.leaves for need in self.needs(leaf)):
            return False
        self.todo[rank].popleft()
        if action.is_communication:
            self.queues[rank].append(Batch(action.leaves, list(action.leaves)))
        else:
            self.done |= {(leaf.kind.value.replace("I", "B"), leaf.stage, leaf.microbatch) for leaf in action.leaves}
        return True

    def deliver(self, rank: int) -> bool:
        for send in self.ready(rank):
            forward = send.kind is Kind.SEND_F
            receive = Action(send.stage + (1 if forward else -1), Kind.RECV_F if forward else Kind.RECV_B, send.microbatch)
            if send.kind in SENDS and receive in self.ready(self.home[receive.stage]):
                self.over(rank, send)
                self.over(self.home[receive.stage], receive)
                return True
        return False

    def ready(self, rank: int) -> list[Action]:
        """The first message of each channel in the batch in flight."""
        first: dict[tuple[bool, int], Action] = {}
        for action in self.queues[rank][0].under_way if self.queues[rank] else ():
            peer = self.home[action.stage + (1 if action.kind in (Kind.SEND_F, Kind.RECV_B) else -1)]
            first.setdefault((action.kind in SENDS, peer), action)
        return list(first.values())

    def over(self, rank: int, action: Action) -> None:
        batch = self.queues[rank][0]
        batch.under_way.remove(action)
        if not batch.under_way:
            self.done |= {(part.kind.value, part.stage, part.microbatch) for part in batch.parts}
            self.queues[rank].popleft()
