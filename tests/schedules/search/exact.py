"""The optimum of a small scheduling problem, or a proven lower bound, by constraint programming (OR-tools' CP-SAT).

Contract
    in    costs whose times are whole numbers, the placement of the stages, the number of microbatches, the cap of each rank in
          bytes, and the seconds that the solver may take
    out   an `Exact`: the best table found, its makespan, and a lower bound of every table's makespan; both are equal where the
          solver has proven the optimum

The model has the simulator's semantics: a rank runs one action at a time, a message delays its reader, and the activations of a
microbatch live from the start of its F to the end of its B, or in part to the end of its W. A backward is whole or split. Under
`Costs.overlap` < 1 a forward may run together with one backward of its rank. Microbatches are equal, so each kind of each stage
takes its microbatches in order: where two microbatches overtake each other, exchanging all that follows changes no time and no
byte.

With `Costs.blocking` the table has sends and receives, which stand anywhere (`exact_messages.py`). Tables with batches of
messages (P2P) are not in the model, nor pairs together with blocking messages.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from typing import Any

from ortools.sat.python import cp_model

from graphpp.schedules.simulate.simulator import simulate
from graphpp.schedules.table.actions import Action, Kind
from graphpp.schedules.table.costs import Costs
from graphpp.schedules.table.schedule import Schedule
from tests.schedules.search.exact_messages import Messages

Key = tuple[Kind, int, int]
"""(kind, stage, microbatch) of an F, an I or a W; a whole backward has the key of its I."""


@dataclass(frozen=True)
class Exact:
    """The best makespan found, with its table, and a lower bound. Both are None where the solver found no table in its time."""

    makespan: int | None
    bound: int
    table: Schedule | None


def exact(
    costs: Costs,
    home: Mapping[int, int],
    microbatches: int,
    caps: Sequence[float],
    effort: float,
    *,
    known: Schedule | None = None,
    longest: int | None = None,
) -> Exact:
    """Solve one problem on one thread. `known`: a table to start from; `longest`: the makespan of a table that is known.

    `effort`: CP-SAT's deterministic time, about seconds; equal arguments give equal results.
    """
    bound = _bound_apart(costs, home, microbatches, caps, effort) if costs.overlap < 1 else 0
    if bound == longest:
        return Exact(None, bound, None)
    for rank in range(len(caps)) if len(caps) > 1 else ():
        relaxed = _Model(costs, home, microbatches, caps, longest, {rank})
        bound = max(bound, relaxed.solve(effort / len(caps))[1])
        if bound == longest:
            return Exact(None, bound, None)
    model = _Model(costs, home, microbatches, caps, longest)
    model.cp.add(model.makespan >= bound)
    if known is not None:
        model.hint(known)
    solver, full = model.solve(effort)
    if solver is None:
        return Exact(None, max(bound, full), None)
    return Exact(round(solver.objective_value), max(bound, full), model.table(solver))


def _bound_apart(
    costs: Costs, home: Mapping[int, int], microbatches: int, caps: Sequence[float], effort: float
) -> int:
    """A lower bound from the problem without pairs, which is solved much sooner.

    In a table with pairs that is stretched by 1 / overlap each pair has room for its two parts one after the other. A pair has
    one overhead, so with overheads this would not hold.
    """
    if costs.overhead:
        return 0
    apart = exact(replace(costs, overlap=1.0), home, microbatches, caps, effort)
    return ceil(costs.overlap * apart.bound - 1e-6)


class _Model:
    """Variables: `start` and `end` of each F, I and W; `whole` backwards; `pairs` that run together.

    Only the ranks in `busy` run one action at a time and keep their caps (None: all ranks). Fewer ranks give a bound sooner.
    """

    def __init__(
        self, costs: Costs, home: Mapping[int, int], microbatches: int, caps: Sequence[float], longest: int | None,
        busy: Container[int] | None = None,
    ) -> None:
        self.costs, self.home, self.microbatches, self.caps = costs, home, microbatches, caps
        self.stages, self.overhead = len(costs.stages), _whole_number(costs.overhead)
        self.horizon = longest or self._one_after_the_other()
        self.cp = cp_model.CpModel()
        keys = [(stage, microbatch) for stage in range(self.stages) for microbatch in range(microbatches)]
        kinds = (Kind.F, Kind.I, Kind.W)
        self.start = {(kind, *key): self._time(f"start of {kind} {key}", self.overhead) for kind in kinds for key in keys}
        self.end = {(kind, *key): self._time(f"end of {kind} {key}") for kind in kinds for key in keys}
        self.whole = {key: self.cp.new_bool_var(f"whole {key}") for key in keys}
        self.pairs = dict(self._pairs()) if costs.overlap < 1 else {}
        assert not (costs.blocking and self.pairs), "a pair would send both of its results at once"
        self.messages = Messages(self.cp, self.overhead, self.horizon, 2 * self.stages * microbatches)
        self.rows: list[list[Any]] = [[] for _ in caps]
        self.work: list[list[Any]] = [[] for _ in caps]
        self.alive: list[list[tuple[Any, int]]] = [[] for _ in caps]
        for key in keys:
            self._computations(*key)
            self._messages(*key)
            self._memory(*key)
        self._in_order()
        if busy is None:
            self.messages.put_in_one_order()
        for rank, (row, alive, cap) in enumerate(zip(self.rows, self.alive, caps, strict=True)):
            if busy is not None and rank not in busy:
                continue
            self.cp.add_no_overlap(row)
            if cap < sum(nbytes for _, nbytes in alive):
                self.cp.add_cumulative([interval for interval, _ in alive], [nbytes for _, nbytes in alive], int(cap))
        self.makespan = self._time("makespan")
        for rank, work in enumerate(self.work):  # implied, but the solver's bound is better with these sums
            lowest = min((stage for stage, other in home.items() if other == rank), default=None)
            if lowest is not None:  # blocking messages are work as well, and the first may be received before the first F
                first = 0 if costs.blocking else self.start[Kind.F, lowest, 0] - self.overhead
                self.cp.add(self.makespan >= first + sum(work))
        self.cp.add_max_equality(self.makespan, list(self.end.values()))
        self.cp.minimize(self.makespan)

    def solve(self, effort: float) -> tuple[cp_model.CpSolver | None, int]:
        """The solver with the best solution, or None without one, and a lower bound."""
        solver = cp_model.CpSolver()
        solver.parameters.max_deterministic_time = effort
        solver.parameters.num_workers = 1
        status = solver.solve(self.cp)
        bound = max(0, round(solver.best_objective_bound))
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return solver, bound
        assert status == cp_model.UNKNOWN, f"no table fits: {solver.status_name(status)}"
        return None, bound

    def _one_after_the_other(self) -> int:
        """A makespan that some table reaches: that of a microbatch after the other."""
        each = (stage.forward + stage.input_grad + stage.weight_grad + stage.of(Kind.B) for stage in self.costs.stages)
        sends = 3 * (sum(self.costs.sends_forward) + sum(self.costs.sends_backward))
        return _whole_number(self.microbatches * (sum(each) + sends + 12 * self.stages * self.overhead))

    def _time(self, name: str = "", least: int = 0) -> Any:
        return self.cp.new_int_var(least, self.horizon, name)

    def _seconds(self, kind: Kind, stage: int) -> int:
        return _whole_number(self.costs.stages[stage].of(kind))

    def _pairs(self) -> Iterator[tuple[tuple[Key, Key], Any]]:
        """For each forward and each backward of a rank whether they run together.

        The backward is of an earlier microbatch: a later one's comes after all forwards of its microbatch, so after this one.
        """
        for forward, backward in product(self.whole, self.whole):
            if self.home[forward[0]] == self.home[backward[0]] and forward[1] > backward[1]:
                yield ((Kind.F, *forward), (Kind.I, *backward)), self.cp.new_bool_var(f"{forward} beside {backward}")

    # ------------------------------------------------------------------------------ actions in time

    def _computations(self, stage: int, microbatch: int) -> None:
        whole, (forward, backward, weight) = self.whole[stage, microbatch], _keys(stage, microbatch)
        if not self._may_be_whole(stage):
            self.cp.add(whole == 0)
        paired_f = [pair for (f, _), pair in self.pairs.items() if f == forward]
        paired_b = [pair for (_, b), pair in self.pairs.items() if b == backward]
        alone_f, alone_b = self._none_of(paired_f), self._none_of(paired_b)
        self._run(forward, Kind.F, [alone_f])
        self._run(backward, Kind.I, [alone_b, whole.negated()])
        self._run(backward, Kind.B, [alone_b, whole])
        self._run(weight, Kind.W, [whole.negated()])
        self.cp.add(self.start[weight] >= self.end[backward])
        self.cp.add(self.end[weight] == self.end[backward]).only_enforce_if(whole)
        for (f, b), pair in self.pairs.items():
            if b == backward:
                self._run_pair(f, b, [pair, whole], Kind.B)
                self._run_pair(f, b, [pair, whole.negated()], Kind.I)

    def _may_be_whole(self, stage: int) -> bool:
        """Whether a whole backward can be better than an I and a W that follows at once."""
        each, parts = self.costs.stages[stage], self._seconds(Kind.I, stage) + self._seconds(Kind.W, stage)
        more_bytes = each.kept_bytes is not None and each.kept_bytes > each.saved_bytes
        return self.costs.overlap < 1 or more_bytes or bool(each.peak_bytes) or (
            self._seconds(Kind.B, stage) < parts + self.overhead
        )

    def _none_of(self, flags: list[Any]) -> Any:
        none = self.cp.new_bool_var("")
        self.cp.add_exactly_one([*flags, none])
        return none

    def _run(self, key: Key, form: Kind, when: Sequence[Any]) -> None:
        """Occupy the rank of `key` if all of `when` hold, for the overhead and the computation."""
        time = self._seconds(form, key[1])
        self.cp.add(self.end[key] == self.start[key] + time).only_enforce_if(*when)
        self._occupy(key, time, when)

    def _run_pair(self, forward: Key, backward: Key, when: Sequence[Any], form: Kind) -> None:
        share = self.costs.overlap * (self._seconds(Kind.F, forward[1]) + self._seconds(form, backward[1]))
        time = _whole_number(round(share, 6))
        for key in (forward, backward):
            self.cp.add(self.end[key] == self.start[key] + time).only_enforce_if(*when)
        self.cp.add(self.start[forward] == self.start[backward]).only_enforce_if(*when)
        self._occupy(forward, time, when)

    def _occupy(self, key: Key, time: int, when: Sequence[Any]) -> None:
        there = self.cp.new_bool_var("")
        self.cp.add_bool_and(when).only_enforce_if(there)
        self.cp.add_bool_or([there, *(flag.negated() for flag in when)])
        size, start, end = self.overhead + time, self.start[key] - self.overhead, self.start[key] + time
        self.work[self.home[key[1]]].append(size * there)
        interval = self.cp.new_optional_interval_var(start, size, end, there, "")
        self.rows[self.home[key[1]]].append(interval)

    def _in_order(self) -> None:
        """Each kind of each stage takes its microbatches in order. A weight gradient within a whole backward has no place."""
        for (kind, stage, microbatch), start in self.start.items():
            if microbatch:
                later = self.cp.add(start >= self.end[kind, stage, microbatch - 1])
                if kind is Kind.W:
                    later.only_enforce_if(self.whole[stage, microbatch].negated())

    # ------------------------------------------------------------------------------ messages and memory

    def _messages(self, stage: int, microbatch: int) -> None:
        """Every reader starts after its maker, and after the message between them."""
        forward, backward, _ = _keys(stage, microbatch)
        makers = {forward: (Kind.F, stage - 1, microbatch), backward: (Kind.I, stage + 1, microbatch)}
        if stage == self.stages - 1:
            makers[backward] = forward
        for reader, maker in makers.items():
            if maker[1] < 0:
                continue
            message = self._message(maker)
            if not self.costs.blocking or message is None:
                self.cp.add(self.start[reader] >= self.end[maker] + (message or 0))
                continue
            ranks = (self.home[maker[1]], self.home[stage])
            read = self.start[reader] - self.overhead
            for rank, size, interval in self.messages.add(reader, ranks, message, self.end[maker], read):
                self.rows[rank].append(interval)
                self.work[rank].append(size)

    def _message(self, maker: Key) -> int | None:
        """The time of the message with a result; None where its reader is on the same rank, or where it has no reader."""
        kind, stage, _ = maker
        reader = stage + 1 if kind is Kind.F else stage - 1
        if kind is Kind.W or reader not in self.home or self.home[reader] == self.home[stage]:
            return None
        times = self.costs.sends_forward if kind is Kind.F else self.costs.sends_backward
        return _whole_number(self.costs.message(times, min(stage, reader)))

    def _memory(self, stage: int, microbatch: int) -> None:
        forward, backward, weight = _keys(stage, microbatch)
        each, whole = self.costs.stages[stage], self.whole[stage, microbatch]
        kept = each.saved_bytes if each.kept_bytes is None else each.kept_bytes
        self._hold(forward, self.end[backward], each.saved_bytes)
        self._hold(weight, self.end[weight], kept, whole.negated(), start=self.end[backward])
        self._hold(forward, self.end[forward], each.change(Kind.F)[0] - each.saved_bytes)
        self._hold(backward, self.end[backward], each.change(Kind.I)[0], whole.negated())
        self._hold(backward, self.end[backward], each.change(Kind.B)[0], whole)
        self._hold(weight, self.end[weight], each.change(Kind.W)[0], whole.negated())

    def _hold(self, key: Key, end: Any, nbytes: int, when: Any = True, start: Any = None) -> None:
        """`nbytes` are alive on the rank of `key` from the start of `key`, or from `start`, to `end`."""
        if nbytes:
            first = self.start[key] if start is None else start
            interval = self.cp.new_optional_interval_var(first, self._time(), end, when, "")
            self.alive[self.home[key[1]]].append((interval, nbytes))

    # ------------------------------------------------------------------------------ tables

    def hint(self, known: Schedule) -> None:
        """Start the search at the times of a table, which has sends and receives if messages occupy ranks."""
        together = set[tuple[Key, Key]]()
        for event in simulate(known, self.costs).events:
            if event.action.is_communication:
                self.messages.hint(event.action, event.start, event.end)
                continue
            forms = {leaf.kind for leaf in event.action.leaves}
            keys = [_key(leaf) for leaf in event.action.leaves]
            for key, leaf in zip(keys, event.action.leaves, strict=True):
                self._hint_times(key, event.start, event.end)
                if leaf.kind in (Kind.B, Kind.I):
                    self.cp.add_hint(self.whole[key[1:]], leaf.kind is Kind.B)
                if leaf.kind is Kind.B:
                    self._hint_times((Kind.W, *key[1:]), event.end, event.end)
            if len(forms) == 2:
                together.add((min(keys), max(keys)))  # F sorts before I
        for pair, flag in self.pairs.items():
            self.cp.add_hint(flag, pair in together)

    def _hint_times(self, key: Key, start: float, end: float) -> None:
        self.cp.add_hint(self.start[key], round(start))
        self.cp.add_hint(self.end[key], round(end))

    def table(self, solver: cp_model.CpSolver) -> Schedule:
        """The table of a solution: each rank's actions by their starts, with sends and receives where messages block."""
        timed: list[list[tuple[tuple[int, int], Action]]] = [[] for _ in self.caps]
        together = {f: b for (f, b), flag in self.pairs.items() if solver.boolean_value(flag)}
        for key, start in self.start.items():
            kind, stage, microbatch = key
            whole = solver.boolean_value(self.whole[stage, microbatch])
            if key in together.values() or (kind is Kind.W and whole):
                continue
            actions = [self._action(solver, each) for each in (key, together.get(key)) if each is not None]
            action = actions[0] if len(actions) == 1 else Action(-1, Kind.OVERLAP_F_B, None, tuple(actions))
            timed[self.home[stage]].append(((solver.value(start), self.messages.most + 1), action))
        for rank, when, action in self.messages.actions(solver):
            timed[rank].append((when, action))
        rows = (tuple(action for _, action in sorted(row, key=lambda each: each[0])) for row in timed)
        return Schedule(tuple(rows), self.stages, self.microbatches, "exact")

    def _action(self, solver: cp_model.CpSolver, key: Key) -> Action:
        kind, stage, microbatch = key
        whole = kind is Kind.I and solver.boolean_value(self.whole[stage, microbatch])
        return Action(stage, Kind.B if whole else kind, microbatch)


def _keys(stage: int, microbatch: int) -> tuple[Key, Key, Key]:
    return (Kind.F, stage, microbatch), (Kind.I, stage, microbatch), (Kind.W, stage, microbatch)


def _key(leaf: Action) -> Key:
    assert leaf.microbatch is not None
    return (Kind.I if leaf.kind is Kind.B else leaf.kind), leaf.stage, leaf.microbatch


def _whole_number(time: float) -> int:
    assert time == round(time), f"the solver's times are whole numbers, not {time}"
    return round(time)
