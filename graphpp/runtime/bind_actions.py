"""Binds each action of a rank's row to its function, and resolves everything that is known before the step.

`row` gives (action, function) in table order. A computing action runs a `Task`, or several as one; a communicating action posts
messages. UNSHARD starts to gather a stage's parameters, and the stage's next computation waits for them; RESHARD frees them;
REDUCE_GRAD starts to sum gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from graphpp.runtime.fsdp.gather_parameters import FlatShard
from graphpp.runtime.fsdp.sharded_gradients import ShardedGradients
from graphpp.runtime.gradients.whole_gradients import WholeGradients
from graphpp.runtime.messages.mailbox import Mailbox, Message
from graphpp.runtime.offloader import Offloader
from graphpp.runtime.program import Phase
from graphpp.runtime.recorder import ActionFunction
from graphpp.runtime.stage import GraphStage
from graphpp.runtime.task import OverlappedActions, Task
from graphpp.schedules.table.actions import BACKWARDS, SENDS, Action, Kind, upstream
from graphpp.schedules.table.schedule import Schedule


@dataclass(frozen=True)
class ActionBinder:
    """`stages`: of this rank, by index; `shards`: the flat shards of each, where whole stages are gathered."""

    schedule: Schedule
    stages: Mapping[int, GraphStage]
    mailbox: Mailbox
    gradients: WholeGradients | ShardedGradients
    shards: Mapping[int, Sequence[FlatShard]]
    offloader: Offloader
    overlaps: OverlappedActions
    training: bool

    def row(self, rank: int) -> list[tuple[Action, ActionFunction]]:
        """The actions of a rank's row with their functions; after an UNSHARD the next computation waits for the parameters."""
        gathered, found = set[int](), []
        actions = [action for action in self.schedule.table[rank] if action is not None]
        ends = {leaf.stage: at for at, action in enumerate(actions) for leaf in action.leaves if leaf.kind in BACKWARDS}
        for at, action in enumerate(actions):
            whole = action.kind is Kind.REDUCE_GRAD and at > ends.get(action.stage, -1)
            function = partial(self.gradients.reduce, action.stage, whole) if whole else self._bound(action)
            if action.kind is Kind.UNSHARD:
                gathered.add(action.stage)
            waits = sorted(gathered & {leaf.stage for leaf in action.leaves}) if action.is_compute else []
            gathered.difference_update(waits)
            found.append((action, partial(self._run_when_ready, waits, function) if waits and self.shards else function))
        return found

    def _bound(self, action: Action) -> ActionFunction:
        if action.kind is Kind.OVERLAP_F_B:
            return self._offloading(action, partial(self._overlap, list(map(self._task, action.parts))))
        if action.is_compute:
            return self._offloading(action, self._task(action).run)
        if action.is_communication:
            return partial(self._communicate, [self._message(leaf) for leaf in action.leaves])
        if action.kind is Kind.REDUCE_GRAD:
            return partial(self.gradients.reduce, action.stage)
        if not self.shards:
            return _nothing
        return partial(self._unshard if action.kind is Kind.UNSHARD else self._reshard, action.stage)

    def _task(self, action: Action) -> Task:
        phase = Phase(action.kind.value) if self.training else Phase.EVALUATE
        makers = upstream(action, self.schedule.stages)
        neighbour = self.stages.get(makers[0].stage) if makers else None
        return self.stages[action.stage].task(phase, _microbatch(action), neighbour)

    def _overlap(self, parts: Sequence[Task]) -> None:
        if not self.overlaps.run(parts):
            for part in parts:
                part.run()

    def _offloading(self, action: Action, compute: ActionFunction) -> ActionFunction:
        """A computation, with the evictions and prefetches of saved values around it."""
        if not self.offloader.evicts:
            return compute

        def run() -> None:
            self.offloader.before(action)
            compute()
            self.offloader.after(action)

        return run

    def _message(self, action: Action) -> Callable[[], Message]:
        """A function that makes the message of a send or receive, not posted yet."""
        stage, direction = self.stages[action.stage], "F" if action.kind in (Kind.SEND_F, Kind.RECV_F) else "B"
        bind = stage.send_message if action.kind in SENDS else stage.receive_message
        return bind(direction, _microbatch(action))

    def _communicate(self, messages: Sequence[Callable[[], Message]]) -> None:
        self.mailbox.start([make() for make in messages])

    def _unshard(self, stage: int) -> None:
        for flat in self.shards[stage]:
            flat.unshard()

    def _run_when_ready(self, stages: Sequence[int], function: ActionFunction) -> None:
        """Wait for the parameters of stages, compute their step-invariant values, and run a computation."""
        for stage in stages:
            for flat in self.shards[stage]:
                flat.ready()
            self.stages[stage].prepare()
        function()

    def _reshard(self, stage: int) -> None:
        """Start to reduce a stage's gradients so far, drop its step-invariant values, and free its whole parameters."""
        if self.training:
            self.gradients.reduce(stage)
        self.stages[stage].put_away()
        for flat in self.shards[stage]:
            flat.reshard()


def _microbatch(action: Action) -> int:
    assert action.microbatch is not None, f"{action} names no microbatch"
    return action.microbatch


def _nothing() -> None:
    """UNSHARD and RESHARD do nothing where parameters are whole on their rank."""
