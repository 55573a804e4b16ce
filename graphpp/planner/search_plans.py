"""Search the fastest way to run a pipeline within a cap of bytes: over named schedules, Megatron's groups, and `keep`.

Contract
    in   the costs of each stage, the bytes of the model's state, the numbers of ranks, microbatches and shards, a cap
    out  `PlanSearch`: every candidate with its seconds and bytes, the fastest that fits first, each loser with its reason;
         `NoPlanError` where none fits, naming the closest
    A candidate is a table that `graphpp.compile` takes as `schedule=`, and the `keep=` of `graphpp.Parallel`. Its seconds are
    those of the simulator, its bytes those of the plan (`memory_plan.py`). Equal arguments give equal results.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

from graphpp.arguments import COUNT, NUMBER, Accepted, checked, or_none
from graphpp.errors import NoPlanError, ScheduleError
from graphpp.planner.memory_plan import MemoryPlan
from graphpp.report.page import Page, PlanEntry
from graphpp.schedules.check.shard_counts import shard_counts
from graphpp.schedules.check.step_memory import step_peaks
from graphpp.schedules.generate.megatron_interleaved import legal_groups, megatron_interleaved
from graphpp.schedules.generate.names import SCHEDULES, Generator
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.hoist_receives import hoist_receives
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.search.arguments import caps_of, check_size
from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import BACKWARDS
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import STATE, StateBytes, held_bytes, sent_by_stage
from graphpp.units import spell_bytes, spell_time

_DIGITS = 9  # of seconds that are compared: simulated times differ by rounding
_SHOWN = 16  # candidates in a printed result
_SPEED = Accepted("a positive number of bytes per second", lambda value: NUMBER.accepts(value) and value > 0)  # type: ignore[operator]


@dataclass(frozen=True)
class PlanCandidate:
    """One way to run the pipeline: `graphpp.compile(.., schedule=each.schedule, parallel=graphpp.Parallel(keep=each.keep))`.

    `seconds`: of a step, simulated, in the unit of the costs. `memory`: the bytes of each rank. `gathers`, `reductions`: how
    often a stage is gathered and reduced in a step, and `sent`: the bytes that a rank sends over `dp_shard` then; each of the
    rank with the most. `reason`: why the candidate is not the best; "" for the best. `fits`: whether it keeps to the cap.
    """

    name: str
    schedule: Schedule
    keep: int | None
    seconds: float
    memory: MemoryPlan
    gathers: float = 0
    reductions: float = 0
    sent: int = 0
    reason: str = ""
    fits: bool = True

    @property
    def entry(self) -> PlanEntry:
        """The candidate as data of a report page."""
        keep = "all" if self.keep is None else str(self.keep)
        details = (("keep", keep), ("gathers of a stage", f"{self.gathers:g}"), ("sent over dp_shard", spell_bytes(self.sent)))
        return PlanEntry(self.name, self.seconds, self.peak, self.reason, self.fits, details)

    @property
    def peak(self) -> int:
        """The most bytes together on any rank."""
        return max(each.peak for each in self.memory.ranks)


@dataclass(frozen=True)
class PlanSearch:
    """All candidates: those that fit by their seconds, then those over the cap by the bytes that they lack."""

    candidates: tuple[PlanCandidate, ...]

    @property
    def best(self) -> PlanCandidate:
        """The fastest candidate that fits; of equally fast ones that with the fewest bytes."""
        return self.candidates[0]

    @property
    def schedule(self) -> Schedule:
        """The table of the best candidate."""
        return self.best.schedule

    @property
    def keep(self) -> int | None:
        """How many whole stages a rank holds under the best candidate; None: all."""
        return self.best.keep

    def to_html(self) -> str:
        """All candidates as an HTML page of its own, time against bytes. Write it to a file with `encoding="utf-8"`."""
        from graphpp.report.page_html import page_html  # the template: loaded by the first page

        best, entries = self.best, tuple(each.entry for each in self.candidates)
        facts = ("best", best.name), ("step", spell_time(best.seconds, "s")), ("most bytes", spell_bytes(best.peak))
        return page_html(Page(title="Plans", facts=facts, plans=entries, memory=best.memory.view))

    def __str__(self) -> str:
        """A table of the first candidates, a line for each."""
        from rich import box  # loaded by the first result that is printed
        from rich.console import Console
        from rich.table import Table

        table = Table(box=box.SIMPLE)
        for column in ("schedule", "keep", "step", "bytes", "gathers", "sent", "reason"):
            table.add_column(column, justify="left" if column in ("schedule", "reason") else "right", no_wrap=True)
        for each in self.candidates[:_SHOWN]:
            sizes = spell_bytes(each.peak), f"{each.gathers:g}", spell_bytes(each.sent)
            keep = "all" if each.keep is None else str(each.keep)
            table.add_row(each.name, keep, spell_time(each.seconds, "s"), *sizes, each.reason or "best")
        out = io.StringIO()
        Console(file=out, width=160, no_color=True).print(table)
        lines = [line.rstrip() for line in out.getvalue().splitlines() if line.strip()]
        more = len(self.candidates) - _SHOWN
        return "\n".join([*lines, *([f"  and {more} more in .candidates"] if more > 0 else [])])


@dataclass(frozen=True)
class _Problem:
    """The facts that all candidates share. `costs`: with the times of gathers and reductions; `caps`: of each rank in bytes."""

    costs: Costs
    state: Sequence[StateBytes]
    microbatches: int
    shards: int
    caps: Sequence[float]

    @property
    def ranks(self) -> int:
        return len(self.caps)

    @property
    def stages(self) -> int:
        return len(self.costs.stages)


@checked(
    ScheduleError,
    costs=COSTS,
    state=STATE,
    ranks=COUNT,
    microbatches=COUNT,
    shards=COUNT,
    bandwidth=or_none(_SPEED),
)
def plan_auto(
    costs: Costs,
    state: Sequence[StateBytes],
    memory_cap: int | Sequence[int] | None = None,
    *,
    ranks: int,
    microbatches: int,
    shards: int = 1,
    bandwidth: float | None = None,
) -> PlanSearch:
    """Search the schedule and the `keep` with the fastest step within `memory_cap` bytes, for all ranks or one for each.

    `costs`: the seconds and the bytes of activations of each stage (`pipe.profile(..).costs`). `state`: the bytes of
    parameters, gradients, optimizer and buffers (`pipe.plan.memory.state`). `shards`: over how many ranks parameters are
    sharded (`dp_shard`; 1: they are whole). `bandwidth`: the bytes per second that a rank sends along `dp_shard`, from which
    the seconds of gathers and reductions follow; None: those of `costs.gathers` and `costs.reductions`, or none.

    Candidates are the named schedules that take these numbers, and `megatron_interleaved` for every group of microbatches;
    under shards each with every `keep` from 1 to the stages of a rank, and without. Raises `NoPlanError` where no candidate
    fits, naming the closest, and `ScheduleError` for numbers that do not belong together.
    """
    check_size(ranks, microbatches)
    _check_state(state, len(costs.stages))
    timed = costs if bandwidth is None else _with_line(costs, state, shards, bandwidth)
    problem = _Problem(timed, state, microbatches, shards, caps_of(memory_cap, ranks))
    found = [each for name, table in _tables(problem) for each in _candidates(problem, name, table)]
    if not found:
        raise ScheduleError(
            f"no named schedule takes {problem.stages} stages on {ranks} ranks and {microbatches} microbatches: give a "
            "multiple of the ranks for both"
        )
    return PlanSearch(_ranked(problem, found))


def _check_state(state: Sequence[StateBytes], stages: int) -> None:
    wrong = next((stage for each in state for stage in each.readers if not 0 <= stage < stages), None)
    if wrong is not None:
        raise ScheduleError(f"state: there is no stage {wrong}, the costs are of {stages} stages: give both of one split")


def _with_line(costs: Costs, state: Sequence[StateBytes], shards: int, bandwidth: float) -> Costs:
    """The costs with the times of gathers and reductions over a line: of `shards` parts each rank has one already."""
    gathered, reduced = sent_by_stage(state, len(costs.stages), shards)
    gathers, reductions = ([nbytes / bandwidth for nbytes in each] for each in (gathered, reduced))
    return replace(costs, gathers=tuple(gathers), reductions=tuple(reductions))


# ---------------------------------------------------------------------------------- the candidates


def _tables(problem: _Problem) -> Iterator[tuple[str, Schedule]]:
    """The tables that train with these numbers, each once, with their names."""
    seen = set[object]()
    for name, generator in _generators(problem):
        try:
            table = generator(problem.ranks, problem.stages, problem.microbatches)
        except ScheduleError:
            continue  # made for other numbers
        actions = tuple(tuple(action for action in row if action is not None) for row in table.table)
        if table.kinds.isdisjoint(BACKWARDS) or actions in seen:
            continue
        seen.add(actions)
        yield name, table


def _generators(problem: _Problem) -> Iterator[tuple[str, Generator]]:
    yield from ((name, generator) for name, generator in SCHEDULES.items() if name != "auto")
    yield "auto", SCHEDULES["auto"]  # on one rank the plain loop, else a schedule that has a name of its own
    for group in legal_groups(problem.ranks, problem.microbatches) if problem.stages > problem.ranks else ():
        yield f"MegatronInterleaved, groups of {group}", partial(megatron_interleaved, group=group)


def _candidates(problem: _Problem, name: str, table: Schedule) -> Iterator[PlanCandidate]:
    sent = table if table.has_communication else add_send_recv(table)
    if problem.shards == 1:
        yield _candidate(problem, name, table, sent, None)
        return
    most = max(list(table.rank_of_stage.values()).count(rank) for rank in range(problem.ranks))
    for keep in (None, *range(1, most + 1)):
        try:
            running = place_shards(sent, keep)
        except ScheduleError:
            continue  # the stages of an overlapped action are more than `keep`
        yield _candidate(problem, name, table, running, keep)


def _candidate(problem: _Problem, name: str, table: Schedule, running: Schedule, keep: int | None) -> PlanCandidate:
    shards = problem.shards if problem.shards > 1 else None
    if not problem.costs.blocking:  # a receive that occupies its rank waits in its place
        running = hoist_receives(running, problem.costs.flow.ahead)
    held = held_bytes(problem.state, running.rank_of_stage, problem.ranks, shards, keep is not None)
    memory = MemoryPlan.of(step_peaks(running, problem.costs, held), problem.state)
    found = PlanCandidate(name, table, keep, simulate(running, problem.costs).makespan, memory)
    if shards is None:
        return found
    counts, bytes_sent = shard_counts(running), sent_by_stage(problem.state, problem.stages, shards)
    return replace(
        found,
        gathers=max(each.gathers_per_stage for each in counts),
        reductions=max(each.reductions_per_stage for each in counts),
        sent=round(max(each.sent(*bytes_sent) for each in counts)),
    )


# ---------------------------------------------------------------------------------- the order of the candidates


def _ranked(problem: _Problem, found: Sequence[PlanCandidate]) -> tuple[PlanCandidate, ...]:
    """The candidates in order, with reasons. Raises `NoPlanError` where none fits."""
    ordered = sorted(found, key=lambda each: (max(0, _lacking(problem, each)[0]), _rounded(each.seconds), each.peak, each.sent))
    best = ordered[0]
    lacking, rank = _lacking(problem, best)
    if lacking > 0:
        raise NoPlanError(
            f"memory_cap admits no plan: the closest, {best.name} with keep={best.keep}, takes {lacking:,.0f} bytes more "
            f"than the cap on rank {rank}: raise the cap, recompute more, or take more ranks or shards, or smaller microbatches"
        )
    return (best, *(_judged(problem, each, best) for each in ordered[1:]))


def _lacking(problem: _Problem, each: PlanCandidate) -> tuple[float, int]:
    """(bytes over the cap, rank) where a candidate lacks most; negative: it fits."""
    over, rank = max((own.peak - cap, -own.rank) for own, cap in zip(each.memory.ranks, problem.caps, strict=True))
    return over, -rank


def _judged(problem: _Problem, each: PlanCandidate, best: PlanCandidate) -> PlanCandidate:
    return replace(each, reason=_reason(problem, each, best), fits=_lacking(problem, each)[0] <= 0)


def _reason(problem: _Problem, each: PlanCandidate, best: PlanCandidate) -> str:
    lacking, rank = _lacking(problem, each)
    if lacking > 0:
        return f"{lacking:,.0f} bytes over the cap on rank {rank}"
    if _rounded(each.seconds) > _rounded(best.seconds):
        return f"slower by {each.seconds / best.seconds - 1:.2%}" if best.seconds else "slower"
    return f"as fast, with {each.peak - best.peak:,} bytes more" if each.peak > best.peak else "as fast"


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.{_DIGITS}g}") if seconds < inf else seconds
