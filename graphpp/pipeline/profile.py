"""`Profile`: the measured times and bytes of a pipeline's step, from recordings on all ranks.

Contract: all ranks call every function with a `place` argument, and all get the same result. Clocks are compared at several
barriers; the median offset corrects the times, as precisely as the ranks leave a barrier together. Stage times are means over
the microbatches of a step, then medians over the repetitions, in seconds. Message times, from send to arrival, are averaged in
the same way, over messages for which a rank waited: ranks that compute delay messages. The lower bound of a message time is
half of a round trip of its tensors between idle ranks, which is also the time if no rank waited.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeVar

import torch

from graphpp.parallel.rank_place import RankPlace
from graphpp.report.text_table import text_table
from graphpp.runtime.messages.mailbox import Mailbox, message_flow
from graphpp.runtime.messages.wire_layout import layout_of
from graphpp.runtime.program import PipelineProgram, TensorMeta
from graphpp.runtime.program_costs import costs_of_programs, costs_of_stage
from graphpp.runtime.recorder import Recorder
from graphpp.runtime.runner import GraphPPRunner
from graphpp.schedules.simulate.bytes_over_time import MemoryCurves
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.actions import SENDS, Action, Kind, peer
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.streams import wait_for_device
from graphpp.units import spell_bytes, spell_time

K = TypeVar("K", bound=Hashable)

_ROUNDS = 9
_BY_KIND = ("peak_bytes", "received_bytes", "sent_bytes")


@dataclass(frozen=True)
class Profile:
    """`timeline`: the repetition of median length, on all ranks. `steps`: each repetition's seconds from first to last action.

    `outside`: the seconds of a step before and after its actions, in which ranks compare data, draw random keys, share losses.
    """

    timeline: Timeline
    costs: Costs
    steps: tuple[float, ...]
    outside: float = 0.0

    def predict(self, schedule: Schedule | None = None) -> float:
        """The seconds of a whole step under a schedule of these stages; None: the profiled one.

        The schedule should have sends and receives (`graphpp.schedules.add_send_recv`), which take time in the runner. Raises
        `ScheduleError` for another number of stages.
        """
        return float(simulate(self.timeline.schedule if schedule is None else schedule, self.costs).makespan + self.outside)

    def __str__(self) -> str:
        """A table: each stage's times and saved bytes, and its message times to the next and the previous stage."""
        head = f"{self.timeline.schedule.name}: {spell_time(self.timeline.makespan, 's')} for a step"
        again = ("R",) * any(each.ahead is not None for each in self.costs.stages)
        names = ("stage", "F", "I", "W", "B", *again, "saved", "sends on", "sends back")
        return "\n".join([head, text_table(names, map(self._row, range(len(self.costs.stages))), lines=False)])

    def _row(self, stage: int) -> tuple[str, ...]:
        each, last = self.costs.stages[stage], len(self.costs.stages) - 1
        kinds = (Kind.F, Kind.I, Kind.W, Kind.B, *((Kind.R,) if each.ahead is not None else ()))
        times = [spell_time(each.of(kind), "s") for kind in kinds]
        on = spell_time(self.costs.sends_forward[stage], "s") if stage < last else ""
        back = spell_time(self.costs.sends_backward[stage - 1], "s") if stage else ""
        return str(stage), *times, spell_bytes(each.saved_bytes), on, back


@dataclass(frozen=True)
class RecordedSteps:
    """A recording of each step of a runner on this rank; `seconds`: from each step's call to its return."""

    runner: GraphPPRunner
    recorders: Sequence[Recorder]
    seconds: Sequence[float]


def profile_of(own: RecordedSteps, others: Sequence[RecordedSteps] = ()) -> Profile:
    """The profile of `own.runner`; `others` run the same stages, and measure the kinds of actions that `own` does not run."""
    place, schedule, programs = own.runner.place, own.runner.schedule, own.runner.programs
    runs = timelines(own, place)
    more = [timelines(other, place) for other in others]
    stages = _with_bytes(stage_costs([runs, *more], schedule.stages), programs, [each.runner for each in (own, *others)])
    shares = [share for run in runs for share in _overlap_shares(run, stages)]
    messages = message_times(programs[0], schedule, place, runs)
    overhead = torch.tensor([recorder.overhead() for recorder in own.recorders], dtype=torch.float64)
    costs = Costs(
        stages,
        *messages,
        overlap=median(shares) if shares else 1.0,
        overhead=float(of_all_ranks(overhead, place).median()),
        flow=message_flow(place.group, place.device),
        woven=any(costs_of_programs(program).woven for program in programs),
    )
    usual = sorted(runs, key=lambda run: run.makespan)[(len(runs) - 1) // 2]
    memory = MemoryCurves(schedule, usual.events, costs)
    steps = tuple(run.makespan for run in runs)
    return Profile(replace(usual, memory=memory), costs, steps, seconds_outside(own, steps))


def seconds_outside(own: RecordedSteps, steps: Sequence[float]) -> float:
    """The median seconds from the call to the last rank's return, minus the seconds of the actions (`steps`)."""
    mine = torch.tensor(own.seconds, dtype=torch.float64)
    whole = of_all_ranks(mine, own.runner.place).amax(0).tolist()
    return float(median(max(each - actions, 0.0) for each, actions in zip(whole, steps, strict=True)))


def barrier(place: RankPlace) -> None:
    of_all_ranks(torch.zeros(1), place)


def of_all_ranks(mine: torch.Tensor, place: RankPlace) -> torch.Tensor:
    """The tensor `mine` of every rank (equal shapes), in order of rank, on the CPU: [ranks, ..]."""
    return place.agreement(place.group).of_all(mine)


def clock_offsets(place: RankPlace) -> list[float]:
    """How far each rank's clock is ahead of rank 0's, in seconds."""
    ends = torch.zeros(_ROUNDS, dtype=torch.float64)
    for index in range(_ROUNDS):
        barrier(place)
        ends[index] = time.perf_counter()
    everyone = of_all_ranks(ends, place)
    return [float((each - everyone[0]).median()) for each in everyone]


def timelines(measured: RecordedSteps, place: RankPlace) -> list[Timeline]:
    """A timeline of all ranks for each recorded step; the earliest event of each starts at 0."""
    recorders, schedule, offsets = measured.recorders, measured.runner.schedule, clock_offsets(place)
    rows = [[action for action in row if action is not None] for row in schedule.table]
    mine = torch.full((len(recorders), max(map(len, rows), default=0), 2), torch.nan, dtype=torch.float64)
    for step, recorder in enumerate(recorders):
        found = {action: (start, end) for action, start, end in recorder.times(schedule.stages)}
        for index, action in enumerate(rows[place.rank]):
            if action in found:
                mine[step, index] = torch.tensor(found[action], dtype=torch.float64)
    everyone = [each - offset for each, offset in zip(of_all_ranks(mine, place), offsets, strict=True)]
    return [_timeline(schedule, rows, [each[step] for each in everyone]) for step in range(len(recorders))]


def _timeline(schedule: Schedule, rows: Sequence[Sequence[Action]], times: Sequence[torch.Tensor]) -> Timeline:
    """`times[rank]`: start and end of each action of the rank's row, [actions, 2]; nan if it was not recorded."""
    began = min((float(each[:, 0].nan_to_num(torch.inf).min()) for each in times if each.numel()), default=0.0)
    events = [
        Event(rank, action, start - began, end - began)
        for rank, row in enumerate(rows)
        for action, (start, end) in zip(row, times[rank].tolist(), strict=False)
        if start == start  # nan: not recorded
    ]
    events.sort(key=lambda event: (event.rank, event.start))
    return Timeline(schedule, tuple(events), name="measured")


def stage_costs(measured: Sequence[Sequence[Timeline]], stages: int) -> tuple[StageCosts, ...]:
    """Each stage's times; 0 for a kind that never ran. `measured`: runs per table; the first table with a kind counts."""
    known = defaultdict[tuple[int, Kind, bool], float](float)
    for runs in reversed(measured):
        known.update(median_of_means(map(_durations, runs)))

    def costs(stage: int, ahead: bool) -> StageCosts:
        first, second, third = (known[stage, kind, ahead] for kind in (Kind.R if ahead else Kind.F, Kind.I, Kind.W))
        return StageCosts(first, second, third, known.get((stage, Kind.B, ahead)))

    again = (costs(each, True) if (each, Kind.R, True) in known else None for each in range(stages))
    return tuple(replace(costs(stage, False), ahead=ahead) for stage, ahead in enumerate(again))


def _durations(run: Timeline) -> Iterator[tuple[tuple[int, Kind, bool], float]]:
    """By stage, kind, and whether an R precedes it."""
    for event in run.events:
        stage, kind, microbatch, _ = event.action
        if event.action.is_compute:
            ahead = kind is not Kind.F and (stage, microbatch) in run.schedule.recomputed_ahead
            yield (stage, kind, ahead), event.duration


def median_of_means(runs: Iterable[Iterable[tuple[K, float]]]) -> dict[K, float]:
    """For each key the mean number in a run, then the median over the runs with the key."""
    means = defaultdict[K, list[float]](list)
    for run in runs:
        found = defaultdict[K, list[float]](list)
        for key, number in run:
            found[key].append(number)
        for key, numbers in found.items():
            means[key].append(fmean(numbers))
    return {key: median(numbers) for key, numbers in means.items()}


def _with_bytes(
    costs: Sequence[StageCosts], own: Sequence[PipelineProgram], runners: Sequence[GraphPPRunner]
) -> tuple[StageCosts, ...]:
    """The costs with the bytes of the largest microbatch; saved bytes are of the programs `own` only."""
    distinct = {id(program): program for program in (*own, *(each for runner in runners for each in runner.programs))}
    found = []
    for index, each in enumerate(costs):
        known = [costs_of_stage(program, index) for program in distinct.values()]
        saved = max(program.stages[index].saved_bytes for program in own)
        ahead = [one.ahead for one in known if one.ahead is not None]
        later = _largest(each.ahead, ahead, max(one.saved_bytes for one in ahead)) if each.ahead is not None else None
        in_line = [one for one in known if one.ahead is None] or known
        found.append(replace(_largest(each, in_line, saved), ahead=later))
    return tuple(found)


def _largest(each: StageCosts, known: Sequence[StageCosts], saved: int) -> StageCosts:
    by_kind: dict[str, Any] = {}
    for name in _BY_KIND:
        several = [getattr(one, name) for one in known]
        kinds = sorted({kind for nbytes in several for kind in nbytes})
        by_kind[name] = {kind: max(nbytes.get(kind, 0) for nbytes in several) for kind in kinds}
    kept = max((one.kept_bytes for one in known if one.kept_bytes is not None), default=None)
    return replace(each, saved_bytes=saved, kept_bytes=kept, **by_kind)


def _overlap_shares(run: Timeline, costs: Sequence[StageCosts]) -> Iterator[float]:
    """For each overlapped action, its compute time divided by the sum of its parts' separate times."""
    for rank in range(run.schedule.ranks):
        events = run.on(rank)
        for event in (event for event in events if event.action.is_compute and event.action.parts):
            within = [each for each in events if each.action.is_communication and event.start <= each.start < event.end]
            ahead = run.schedule.recomputed_ahead
            apart = sum(costs[leaf.stage].of(leaf.kind, leaf[:3:2] in ahead) for leaf in event.action.leaves)
            if apart:
                yield (event.duration - sum(each.duration for each in within)) / apart


def message_times(
    program: PipelineProgram, schedule: Schedule, place: RankPlace, runs: Sequence[Timeline]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of one message over each boundary, forward and backward; 0 where both stages are on one rank."""
    found = median_of_means(((send._replace(microbatch=None), seconds) for send, seconds in waited_for(run)) for run in runs)
    on, back = idle_message_times(program, schedule, place)
    return (
        tuple(max(found.get(Action(at, Kind.SEND_F), 0.0), idle) for at, idle in enumerate(on)),
        tuple(max(found.get(Action(at + 1, Kind.SEND_B), 0.0), idle) for at, idle in enumerate(back)),
    )


def waited_for(run: Timeline) -> Iterator[tuple[Action, float]]:
    """Each send whose receiver was already waiting, and the seconds from the send's end until the message arrived."""
    events = {leaf: event for event in run.events for leaf in event.action.leaves if leaf.is_communication}
    for send, event in events.items():
        arrival = events.get(peer(send)) if send.kind in SENDS else None
        if arrival is not None and arrival.start <= event.start < arrival.end:
            yield send, max(arrival.end - event.end, 0.0)


def idle_message_times(
    program: PipelineProgram, schedule: Schedule, place: RankPlace
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of one message over each boundary between idle ranks, forward and backward."""
    mailbox, rank_of = Mailbox(place.group, place.device), schedule.rank_of_stage
    found = torch.zeros(2, max(len(program.stages) - 1, 0), dtype=torch.float64)
    for index in range(found.shape[1]):
        low, high = rank_of[index], rank_of[index + 1]
        barrier(place)  # so that the other ranks are idle
        if low != high and place.rank in (low, high):
            peer = high if place.rank == low else low
            for way, metas in enumerate((program.boundaries[index].forward, program.boundaries[index].backward)):
                found[way, index] = _half_a_round(mailbox, metas, peer, first=place.rank == low)
    slowest = of_all_ranks(found, place).amax(0)  # both ranks of the boundary measured it
    return tuple(slowest[0].tolist()), tuple(slowest[1].tolist())


def _half_a_round(mailbox: Mailbox, metas: Sequence[TensorMeta], peer: int, *, first: bool) -> float:
    """Half of a round trip with the peer, in seconds: the median after one warm-up round."""
    layouts = [layout_of(meta) for meta in metas]
    values = [layout.buffer(mailbox.device).value() for layout in layouts]
    rounds = []
    for _ in range(_ROUNDS + 1):
        began = time.perf_counter()
        for sends in (first, not first):
            if sends:
                mailbox.start([mailbox.outgoing(values, layouts, peer)])
            else:
                arriving = mailbox.incoming(layouts, peer)
                mailbox.start([arriving])
                mailbox.wait(arriving)
        wait_for_device(mailbox.device)
        rounds.append(time.perf_counter() - began)
    mailbox.flush()
    return median(rounds[1:]) / 2
