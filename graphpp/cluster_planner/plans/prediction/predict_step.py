"""Predict the seconds and bytes of a training step under one setting of a `PlanRequest`.

A step with many microbatches is simulated twice with fewer of them and extrapolated linearly: once the pipeline is full, each
further round takes equal time, and equal bytes or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple, cast

from graphpp.cluster_planner.plans.prediction.gradient_sums import SharedSeconds, shared_on, with_sums
from graphpp.cluster_planner.plans.prediction.lower_bound import least_seconds
from graphpp.cluster_planner.plans.prediction.offloaded import host_bytes, windows_of_setting
from graphpp.cluster_planner.plans.prediction.read_tables import FLOW, ReadTable, counts_of, read_table
from graphpp.cluster_planner.plans.prediction.single_layers import LayerGathers, priced_setting
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import PlanSetting, admits
from graphpp.cluster_planner.plans.training_plan import RankBytes, StepSeconds, fullest_rank
from graphpp.devices import Link, MixedMachines
from graphpp.planner.segments import Cut
from graphpp.schedules.check.step_memory import StepPeak
from graphpp.schedules.simulate.step_time import HostCopies
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, with_messages
from graphpp.schedules.table.offload_window import OffloadWindow
from graphpp.schedules.table.state_bytes import HeldBytes, StateBytes, held_bytes, sent_by_stage

_SMALL = 2e-3  # of a step: gathers and reductions that together take less count as hidden


@dataclass(frozen=True)
class Prediction(RankBytes):
    """A setting's predicted step. `peaks`: peak bytes of each pipeline rank; `memory`: bytes by kind on the fullest rank;
    `sent`: bytes per step along each mesh dimension, of the rank that sends most; `moved`: the share of the most balanced cut's
    seconds that moves of stage starts save; `host`: bytes of offloaded values in the memory of a machine. `caps`: bytes that
    each pipeline rank may hold, if they are of unlike devices."""

    setting: PlanSetting
    cut: Cut
    seconds: StepSeconds
    peaks: tuple[int, ...]
    memory: Mapping[str, int]
    sent: Mapping[str, int]
    host: int = 0
    caps: tuple[int, ...] = ()
    moved: float = 0.0


def predict(request: PlanRequest, setting: PlanSetting, cut: Cut | None = None) -> Prediction | None:
    """Predict a setting. Default `cut`: the most balanced one. None if the schedule has no table for these numbers."""
    tables = tables_of(request, setting)
    if tables is None:
        return None
    step = _Step(request, setting, cut or request.of(setting).stages(setting).cut)
    return step.prediction([step.of(table) for table in tables], counts_of(setting))


def tables_of(request: PlanRequest, setting: PlanSetting) -> list[ReadTable] | None:
    """The tables to simulate for a setting; None if the schedule does not admit its numbers."""
    if not admits(setting.schedule, setting.shape.pp, setting.microbatches):
        return None
    sharded = request.dtype is not None or setting.shape.data_ranks * setting.shape.cp > 1
    found = [read_table(setting.schedule, setting.shape.pp, each, setting.keep, sharded) for each in counts_of(setting)]
    return [each for each in found if each is not None] if all(found) else None


def stage_costs(request: PlanRequest, setting: PlanSetting, cut: Cut, home: Sequence[int] | None = None) -> Costs:
    """The costs of the stages of a cut. With `keep=0` they include the seconds that computations wait for gathers. `home`: the
    pipeline rank of each stage (None: those of the setting)."""
    return _Step(request, setting, cut, home=home).waiting


def order_costs(
    request: PlanRequest, setting: PlanSetting, cut: Cut, table: ReadTable, ahead: bool = False
) -> tuple[Costs, list[tuple[int, ...]]]:
    """The costs for an order search, and two lists of each rank's bytes without activations: at its peak, and the sum of the
    maxima of each kind. `ahead`: with the costs of an R."""
    step = _Step(request, setting, cut, ahead)
    peaks = step.rank_peaks(table)
    totals = [each.nbytes for each in peaks], [sum(each.most.values()) for each in peaks]
    beside = [tuple(own - each.most["activations"] for own, each in zip(total, peaks, strict=True)) for total in totals]
    return step.waiting, beside


def costs_and_bound(request: PlanRequest, setting: PlanSetting, cut: Cut) -> tuple[Costs, float]:
    """The costs of the stages, and a lower bound of the seconds under any cut, order and placement (`lower_bound.py`)."""
    step = _Step(request, setting, cut)
    return step.waiting, step.bound


def peaks_of(request: PlanRequest, setting: PlanSetting, cut: Cut, tables: Sequence[ReadTable]) -> tuple[int, ...]:
    """Peak bytes of each pipeline rank, equal to `predict(..).peaks`."""
    step = _Step(request, setting, cut)
    return step.continued_peaks([step.rank_peaks(table) for table in tables], counts_of(setting))


def continued(counts: Sequence[int], microbatches: int) -> Callable[[float, float], float]:
    """A linear extrapolation from one or two simulated steps to all microbatches."""
    further = (microbatches - counts[-1]) / (counts[-1] - counts[0]) if len(counts) > 1 else 0.0
    return lambda low, high: high + further * (high - low)


class _Simulated(NamedTuple):
    """One simulated step. `alone`: makespan without gathers, reductions and host copies; `waits`: delay by host copies; `busy`,
    `stages`: of the busiest rank; `exchanged`: bytes by dimension within one microbatch's computations, `pp` between stages;
    `along`: bytes along data ranks; both of the rank that sends most; `host`: offloaded bytes in the memory of a machine;
    `optimizer`: seconds of its step; `whole`: whether backwards are not split."""

    makespan: float
    alone: float
    waits: float
    busy: float
    stages: list[int]
    peaks: tuple[StepPeak, ...]
    memory: Mapping[str, int]
    exchanged: Mapping[str, float]
    along: float
    host: float
    optimizer: float
    whole: bool


class _Stages(NamedTuple):
    """Costs of the stages, with gathers and reductions; their state; seconds of its gathers and sums."""

    costs: Costs
    state: tuple[StateBytes, ...]
    shared: SharedSeconds


_GROWING = ("makespan", "busy", "alone", "waits")


class _Step:
    def __init__(
        self, request: PlanRequest, setting: PlanSetting, cut: Cut, ahead: bool = False, home: Sequence[int] | None = None
    ) -> None:
        self._home = tuple(setting.schedule.homes(setting.shape.pp) if home is None else home)
        self._request, self._setting, self.cut = request.of(setting), setting, cut
        self._ahead, self._groups = ahead or setting.schedule.recomputes_ahead, tuple(request.groups(setting))
        self._priced = priced_setting(self._request, setting, cut, self._ahead)
        self._machines = [request.machines.groups[group] for group in self._groups]  # of each stage

    @cached_property
    def _stages(self) -> _Stages:
        """Equal for all schedules that place the stages on the same ranks, and for all `keep` but 0."""
        it, known = self._setting, self._request.timed
        priced = it.shape, it.rows, it.microbatches, it.recompute, it.recomputed, self._ahead
        key = (*priced, self.cut, self._groups, self._home, it.schedule.stages_per_rank, it.keep == 0)
        if key not in known:
            known[key] = self._timed()
        found: _Stages = known[key]
        return found

    def _timed(self) -> _Stages:
        shape, experts = self._setting.shape, self._priced.expert_state
        segments = self._priced.segments
        pairs = zip(segments.state, experts, strict=True)
        named = tuple(replace(one, shards=shape.dp_shard if expert else shape.shards) for one, expert in pairs)
        costs, state = replace(segments, state=named).stages(self.cut)
        machines, stride, keep = self._machines, shape.stride("pp"), self._setting.keep
        shared = shared_on(machines, self._setting, state, experts, self._request.usual.sum_order)
        crossing, message = self._crossing(), self._request.machines.message
        firsts = [rank * stride for rank in self._home]
        on, back = (
            tuple(message(nbytes, *ends, stride) for ends, nbytes in zip(pairwise(firsts), sizes, strict=True))
            for sizes in crossing
        )
        timed = replace(costs, sends_forward=on, sends_backward=back, gathers=shared.gathers, reductions=shared.reductions)
        stages = costs.stages
        if keep != 0 and not self._request.usual.compiled:
            stages = with_sums(stages, state, machines, self._setting.microbatches)
        moving = replace(timed, stages=with_messages(stages, *crossing), flow=FLOW)
        return _Stages(self._as_run(moving), state, shared)

    def _as_run(self, costs: Costs) -> Costs:
        """The costs; in sequence where computations gather single layers, since these keep their order."""
        return costs.in_sequence if self._setting.keep == 0 else costs

    @property
    def _caps(self) -> tuple[int, ...]:
        """Bytes that each pipeline rank may hold; () on equal machines, which have one cap."""
        return tuple(self._request.caps(self._setting.shape, 0)) if isinstance(self._request.machines, MixedMachines) else ()

    def _crossing(self) -> tuple[list[int], ...]:
        sizes = self._priced.forward_bytes, self._priced.backward_bytes
        return tuple([each[start - 1] for start in self.cut[1:]] for each in sizes)

    def _held(self, table: ReadTable, in_order: bool = False) -> tuple[HeldBytes, ...]:
        state = self._stages.state
        shape = self._setting.shape
        shards = shape.shards if self._request.dtype is not None or shape.shards > 1 else None
        keep = self._setting.keep
        layers = self._layers.bytes() if keep == 0 else None
        if keep == 0:  # each computation casts what it gathered
            state = tuple(replace(one, derived=0) for one in state)
        home, ordered = table.rank_of_stage, self._request.usual.sum_order == "ranks"
        copies = prod(getattr(shape, name) for name in shape.copies) if ordered else 1
        return held_bytes(state, home, shape.pp, shards, keep is not None, layers, in_order=in_order, averaged_over=copies)

    @cached_property
    def _layers(self) -> LayerGathers:
        return LayerGathers(self._machines, self._setting.shape, self._priced, self.cut, self._request.reduced_width)

    @property
    def waiting(self) -> Costs:
        """The stage costs. With `keep=0` they include the seconds that computations wait for gathers of single layers."""
        costs = self._stages.costs
        return self._layers.costs(costs) if self._setting.keep == 0 else costs

    def rank_peaks(self, table: ReadTable) -> tuple[StepPeak, ...]:
        searched = self._setting.schedule.order is not None  # gradients may wait: they are summed in microbatch order
        memory = table.memory if self._setting.offload is None else table.offloading(self._windows(table))
        return memory.peaks([self._stages.costs], self._held(table, in_order=searched))

    def _windows(self, table: ReadTable) -> tuple[OffloadWindow, ...]:
        fraction = self._setting.offload
        return () if fraction is None else windows_of_setting(self._priced, self.cut, table.schedule, fraction)

    def continued_peaks(self, peaks: Sequence[tuple[StepPeak, ...]], counts: Sequence[int]) -> tuple[int, ...]:
        """Peak bytes of each rank with all microbatches, extrapolated from one or two simulated steps."""
        further = continued(counts, self._setting.microbatches)

        def peak(low: StepPeak, high: StepPeak) -> int:  # messages do not grow with the microbatches
            rests = (each.nbytes - each.parts["messages"] for each in (low, high))
            return round(further(*rests)) + high.parts["messages"]

        return tuple(map(peak, peaks[0], peaks[-1]))

    def of(self, table: ReadTable) -> _Simulated:
        peaks = self.rank_peaks(table)
        makespan, busy, alone = self._spans(table)
        waits = self._waits_for_copies(table)
        fullest = peaks[fullest_rank([each.nbytes for each in peaks], self._caps)]
        busiest = busy.index(max(busy))
        own = [stage for stage, rank in table.rank_of_stage.items() if rank == busiest]
        of_ranks = [self._request.machines.groups[each] for each in self._request.groups_of_ranks(self._setting.shape)]
        host = host_bytes(table.schedule, self._windows(table), self._setting.shape, of_ranks)
        exchanged = {"pp": self._crossed(table), **self._exchanged(table)}
        bytes_of = peaks, fullest.most, exchanged, self._sent_by_shards(table), host
        whole = Kind.B in table.schedule.kinds
        return _Simulated(makespan + waits, alone, waits, busy[busiest], own, *bytes_of, self._optimizer_seconds(table), whole)

    def _waits_for_copies(self, table: ReadTable) -> float:
        windows, collectives = self._windows(table), self._setting.keep != 0
        if self._request.machines.host is None or not windows:
            return 0.0
        links = [cast(Link, each.host) for each in self._machines]

        def seconds(each: OffloadWindow) -> float:
            return len(each.values) * links[each.stage].latency + links[each.stage].seconds(each.nbytes)

        copies = HostCopies(windows, seconds)
        delayed = table.times.seconds(self.waiting, collectives=collectives, copies=copies).makespan
        return max(0.0, delayed - table.times.seconds(self.waiting, collectives=collectives).makespan)

    def _sent_by_shards(self, table: ReadTable) -> float:
        if self._setting.keep == 0:
            return self._layers.sent(table.schedule)
        return table.most.sent(*sent_by_stage(self._stages.state, self._setting.stages, self._setting.shape.shards))

    def _spans(self, table: ReadTable) -> tuple[float, tuple[float, ...], float]:
        """(makespan, busy seconds of each rank, makespan without gathers and reductions)."""
        costs, copies = self._stages.costs, self._of_copies(table)
        if self._setting.keep == 0:
            alone, busy = table.times.seconds(costs, collectives=False)
            return table.times.seconds(self.waiting, collectives=False).makespan + copies, busy, alone
        makespan, busy = table.times.seconds(costs)
        collected = table.most.sent(costs.gathers, costs.reductions)
        if collected <= _SMALL * makespan:
            return makespan + copies, busy, makespan
        alone = table.times.seconds(costs, collectives=False).makespan
        hidden = max(0.0, collected - (makespan - alone))
        return makespan + hidden * self._stages.shared.contention + copies, busy, alone

    def _of_copies(self, table: ReadTable) -> float:
        """Seconds of the sums over copies that nothing hides, of the rank that has most."""
        seconds = [0.0] * self._setting.shape.pp
        for stage, each in enumerate(self._stages.shared.copies):
            seconds[table.rank_of_stage[stage]] += each
        return max(seconds)

    def prediction(self, steps: Sequence[_Simulated], counts: tuple[int, ...]) -> Prediction:
        first, last = steps[0], steps[-1]
        further = continued(counts, self._setting.microbatches)
        peaks = self.continued_peaks([first.peaks, last.peaks], counts)
        grown = {
            kind: round(further(first.memory.get(kind, nbytes), nbytes)) if kind == "activations" else nbytes
            for kind, nbytes in last.memory.items()
        }
        makespan, busy, alone, waits = (further(getattr(first, name), getattr(last, name)) for name in _GROWING)
        parts = self._parts(makespan - waits, busy, last, makespan - waits - alone)
        sent = self._sent(further(first.along, last.along), last.exchanged)
        host = round(further(first.host, last.host))
        return Prediction(self._setting, self.cut, replace(parts, offload=waits), peaks, grown, sent, host, self._caps)

    def _parts(self, makespan: float, busy: float, step: _Simulated, unhidden: float) -> StepSeconds:
        """The parts of the busiest rank's step. `unhidden`: seconds of gathers and reductions that no computation hides."""
        plain = replace(self._setting, recompute=None, recomputed=None)
        usual = priced_setting(self._request, plain, self.cut).segments.costs.stages
        costs = self._as_run(self._priced.segments.costs).stages
        ends = [*self.cut[1:], len(costs)]
        own = [at for stage in step.stages for at in range(self.cut[stage], ends[stage])]
        phases = (Kind.F,), (Kind.B,) if step.whole else (Kind.I, Kind.W)
        each = [[(costs[at].of(kind), costs[at].lines(kind).computed) for at in own for kind in kinds] for kinds in phases]
        forward, backward = (sum(took for took, _ in pairs) for pairs in each)
        again = max(0.0, sum(costs[at].lines(Kind.B).computed - usual[at].lines(Kind.B).computed for at in own))
        exchanged = [sum(took - computed for took, computed in pairs) for pairs in each]
        share = busy / (forward + backward) if forward + backward else 0.0
        return StepSeconds(
            forward=(forward - exchanged[0]) * share,
            backward=(backward - again - exchanged[1]) * share,
            recompute=again * share,
            collectives=sum(exchanged) * share,
            bubble=max(0.0, makespan - busy - unhidden),  # rounding may make the difference negative
            gradients=unhidden,
            optimizer=step.optimizer,
        )

    @property
    def bound(self) -> float:
        if len(self._request.machines.groups) > 1:
            return 0.0  # another placement computes a segment on another device
        shape, stride, again = self._setting.shape, self._setting.shape.stride("pp"), self._setting.recompute is not None
        priced = priced_setting(self._request, self._setting, self.cut, again)  # a recomputation may run ahead
        crossing, message = (priced.forward_bytes, priced.backward_bytes), self._request.machines.message
        nearest = [(rank * stride, (rank + 1) * stride) for rank in range(shape.pp - 1)] or [(0, 0)]
        on, back = (tuple(min(message(nbytes, *ends, stride) for ends in nearest) for nbytes in sizes) for sizes in crossing)
        segments = replace(priced.segments.costs, sends_forward=on, sends_backward=back, hidden=self._stages.costs.hidden)
        optimizer = sum(self._optimizer_by_stage()) / shape.pp
        return least_seconds(self._as_run(segments), shape.pp, self._setting.microbatches) + optimizer

    def _optimizer_seconds(self, table: ReadTable) -> float:
        """Seconds of the optimizer on the rank with most of them."""
        of_rank = [0.0] * self._setting.shape.pp
        for stage, seconds in enumerate(self._optimizer_by_stage()):
            of_rank[table.rank_of_stage[stage]] += seconds
        return max(of_rank)

    def _optimizer_by_stage(self) -> list[float]:
        """Seconds to read and write the optimizer's operands, bound by memory bandwidth, and to compute the values of
        parameters that whole stages compute once per step."""
        by_stage, speeds = [0.0] * self._setting.stages, [each.device.memory_bandwidth for each in self._machines]
        if self._setting.keep != 0:
            for stage, (first, end) in enumerate(pairwise((*self.cut, len(self._priced.layers)))):
                by_stage[stage] += sum(each[Kind.F].derived for each in self._priced.layers[first:end])
        for one in self._stages.state:
            shards = one.shards or 1
            rows = one.weights if one.rows is None else one.rows
            sums = one.row_sums or one.sums  # gradients that are reduced in place are read there
            for stage in one.makers:
                by_stage[stage] += (2 * rows + sums + 2 * one.optimizer) / shards / speeds[stage]
        return by_stage

    def _crossed(self, table: ReadTable) -> float:
        """Bytes that a rank sends to other ranks for one microbatch, of the rank that sends most."""
        ranks, home = [0] * self._setting.shape.pp, table.rank_of_stage
        for at, (on, back) in enumerate(zip(*self._crossing(), strict=True)):
            if home[at] != home[at + 1]:
                ranks[home[at]] += on
                ranks[home[at + 1]] += back
        return max(ranks)

    def _exchanged(self, table: ReadTable) -> dict[str, float]:
        """Bytes by dimension that a rank sends within one microbatch's computations, of the rank that sends most."""
        sent = self._priced.sent
        ranks: list[dict[str, float]] = [{} for _ in range(self._setting.shape.pp)]
        for stage, (first, end) in enumerate(pairwise((*self.cut, len(sent)))):
            of_rank = ranks[table.rank_of_stage[stage]]
            for name in sent[first]:
                of_rank[name] = of_rank.get(name, 0.0) + sum(each[name] for each in sent[first:end])
        names = dict.fromkeys(name for each in ranks for name in each)  # a rank may have no stage
        return {name: max(each.get(name, 0.0) for each in ranks) for name in names}

    def _sent(self, along: float, exchanged: Mapping[str, float]) -> dict[str, int]:
        """Bytes that a rank sends per step along each dimension. `along`: of shards; `exchanged`: of one microbatch."""
        setting = self._setting
        sums = {name: self._sent_to_copies(getattr(setting.shape, name)) for name in setting.shape.copies}
        within = {name: setting.microbatches * nbytes + sums.pop(name, 0.0) for name, nbytes in exchanged.items()}
        return {name: round(each) for name, each in ({"pp": 0.0, "dp_shard": along} | sums | within).items()}

    def _sent_to_copies(self, copies: int) -> float:
        """Bytes that a rank sends in ring all-reduces over `copies` ranks; averaged over the pipeline ranks."""
        total = 0.0
        for one in self._stages.state:
            total += len(one.makers) * (one.sums if one.sent is None else one.sent) / (one.shards or 1)
        return 2 * (copies - 1) / copies * total / self._setting.shape.pp
