"""Price a model's segments in seconds and bytes on machines that need not exist, without measurements.

All figures are of one rank. A kernel takes the launch plus the longer of its arithmetic and its memory traffic, each at the
share of the peak that the device's curves give, on the slowest of all devices. Exchanges are added in full, but for the
seconds that the deployment hides under computations, which then lose time. Tensor-parallel ranks are neighbours, and so are
ranks with folded experts; context- and expert-parallel ranks are `tp` apart. With `cp` ranks have equal parts of each row's
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import NamedTuple

from graphpp.arguments import checked, one_of
from graphpp.cluster_planner.costs.deployment import REDUCED, Deployment, check_degrees
from graphpp.cluster_planner.costs.model_costs import PHASES, Degrees, ModelCosts, SegmentKind, Variant
from graphpp.cluster_planner.costs.operations import Operation, Size
from graphpp.cluster_planner.costs.state import state_of_segments
from graphpp.devices import Machines
from graphpp.errors import ScheduleError
from graphpp.options.memory import Memory
from graphpp.planner.segments import Segments
from graphpp.runtime.program import Phase
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts

_USUAL = Deployment()
_MODEL_SCORES = 0.8  # of a fused attention's backward, which computes the scores again: 5 products for 2 of the forward
_SHOWN = 0.1  # of the exchanges of experts that run beside another microbatch, as in an OVERLAP_F_B
_HIDDEN = 0.8  # in a backward, of the exchanges that its weight gradients could hide (benchmarks/hidden_share.py: from 0.67)
_KINDS = tuple(Kind(phase.value) for phase in PHASES)
_WHOLE_PASS = tuple(PHASES.index(phase) for phase in (Phase.FORWARD, Phase.BACKWARD))


@dataclass(frozen=True)
class PhaseBytes:
    """Bytes of whole parameters that a phase reads, and of gradients that it makes; experts are counted separately. `derived`:
    seconds of the values of parameters alone, which the seconds of the phase do not contain."""

    read: int = 0
    expert_read: int = 0
    made: int = 0
    expert_made: int = 0
    derived: float = 0.0


class OffloadableBytes(NamedTuple):
    nbytes: int
    readers: tuple[Kind, ...]
    received: bool
    sent: bool


@dataclass(frozen=True)
class PricedModel:
    """A model on machines, for one microbatch on one data-parallel rank.

    `segments`: seconds, bytes and state, one entry per segment instead of per stage. `expert_state`: whether each piece of
    state belongs to experts, which have fewer replicas. `forward_bytes`, `backward_bytes`: over the boundary after each segment
    but the last. `flops`: model FLOPs of the microbatch on all ranks: a backward counts twice its forward, and nothing twice
    that is recomputed; `executed`: the FLOPs that run. A causal attention counts half of its square. By segment: `sent`: bytes
    that a rank sends along `tp`, `ep` and `cp` in a forward and a backward; `layers`: bytes by phase; `offloadable`: saved
    values that may move to host memory; empty for a mixture of recomputations.
    """

    segments: Segments
    expert_state: tuple[bool, ...]
    forward_bytes: tuple[int, ...]
    backward_bytes: tuple[int, ...]
    flops: float
    executed: float
    sent: tuple[Mapping[str, float], ...] = ()
    layers: tuple[Mapping[Kind, PhaseBytes], ...] = ()
    offloadable: tuple[tuple[OffloadableBytes, ...], ...] = ()

    @cached_property
    def paces(self) -> tuple[float, float]:
        """The times of an F and a B, and of an OVERLAP_F_B of both, over their time in sequence, if all stages are alike."""
        costs = self.segments.costs
        lines = [part.lines(kind) for part in costs.stages for kind in (Kind.F, Kind.B)]
        computed, exchanged, both = map(sum, zip(*lines, strict=True))
        total = (computed + exchanged) or 1.0
        return 1 - both / total, 1 - max(both, costs.hidden * min(computed, exchanged)) / total


@checked(
    ScheduleError, machines=one_of(Machines, takes="a graphpp.devices.Machines"),
    deployment=one_of(Deployment, takes="a graphpp.cluster_planner.costs.Deployment"),
)  # fmt: skip
def priced(
    costs: ModelCosts, machines: Machines, deployment: Deployment = _USUAL, alike: PricedModel | None = None
) -> PricedModel:
    """Price a microbatch. `alike`: an earlier price with equal costs and deployment but for rows and recomputation, whose state
    is reused because the state takes most of the time. Raises `ScheduleError` for degrees that the model does not admit."""
    check_degrees(costs, deployment)
    tp, ep, cp = deployment.tp, deployment.ep, deployment.cp
    degrees = Degrees(deployment.rows / costs.rows, tp, ep, cp, deployment.sequence, deployment.folded)
    pricing = _Pricing(machines, degrees, deployment)
    mix = _mixed(costs, deployment.recompute, degrees)
    variants, shares = [costs.variants[name] for name, _ in mix], [share for _, share in mix]
    each = [pricing.segment([one.kinds[one.kind_of[at]] for one in variants], shares) for at in range(len(costs.starts))]
    lost, exchanged = (sum(one.beside[at] for one in each) for at in (0, 1))
    hidden = Costs.hidden * max(0.0, 1 - lost / exchanged) if exchanged else Costs.hidden
    on, back = (tuple(round(degrees.amount(size)) for size in sizes) for sizes in (costs.forward, costs.backward))
    ahead, behind = (tuple(machines.send(nbytes, tp * cp) for nbytes in sizes) for sizes in (on, back))
    if alike is not None:
        state, experts = alike.segments.state, alike.expert_state
    else:
        width = REDUCED.get(deployment.reduce_dtype or "")
        usual, narrow = Memory(optimizer=deployment.optimizer), deployment.casts == "shards"
        state, experts = state_of_segments(costs, degrees, usual, width, narrow, deployment.in_place)
    return PricedModel(
        segments=Segments(costs.starts, Costs(tuple(one.stage for one in each), ahead, behind, hidden=hidden), state),
        expert_state=experts, forward_bytes=on, backward_bytes=back,
        flops=_flops(costs.variants[None], degrees.factor, _MODEL_SCORES),
        executed=sum(share * _flops(one, degrees.factor) for one, share in zip(variants, shares, strict=True)),
        sent=tuple(one.sent for one in each), layers=tuple(one.phases for one in each),
        offloadable=tuple(one.offloadable for one in each),
    )  # fmt: skip


def _flops(variant: Variant, factor: float, scores: float = 1.0) -> float:
    """FLOPs of a forward and backward on all ranks; `scores`: what counts of those of fused attentions' backwards."""
    whole = Degrees(factor, sequence=False)
    parts = {"attention_backward": scores}
    pairs = [[pair for at in _WHOLE_PASS for pair in kind.operations[at]] for kind in variant.kinds]
    per_kind = [sum(parts.get(each.kind, 1.0) * count * whole.amount(each.flops) for each, count in found) for found in pairs]
    return sum(per_kind[kind] for kind in variant.kind_of)


# -------------------------------------------------------------------------------------------- recomputation


def _mixed(costs: ModelCosts, recompute: str | float | None, degrees: Degrees) -> list[tuple[str | None, float]]:
    """[(kind of recomputation, share)]. A fraction gives the two kinds whose saved bytes enclose it."""
    if recompute is None or isinstance(recompute, str):
        return [(recompute, 1.0)]
    names = (None, "selective", "full")
    saved = [_saved(costs.variants[name], degrees) for name in names]
    wanted = recompute * saved[0]
    for more in (0, 1):
        if saved[more] >= wanted >= saved[more + 1] and saved[more] > saved[more + 1]:
            share = (wanted - saved[more + 1]) / (saved[more] - saved[more + 1])
            return [(names[more], share), (names[more + 1], 1 - share)]
    return [("full", 1.0)]


def _saved(variant: Variant, degrees: Degrees) -> float:
    each = [degrees.amount(kind.saved) for kind in variant.kinds]
    return sum(each[kind] for kind in variant.kind_of)


# -------------------------------------------------------------------------------------------- seconds


class _PricedKind(NamedTuple):
    """`beside`: the seconds that a forward and a backward lose beside all of their exchanges, and those of the exchanges."""

    stage: StageCosts
    beside: tuple[float, float]
    phases: Mapping[Kind, PhaseBytes]
    sent: Mapping[str, float]
    offloadable: tuple[OffloadableBytes, ...]


class _Pricing:
    """Prices operations and kinds of segments, each once."""

    def __init__(self, machines: Machines, degrees: Degrees, deployment: Deployment) -> None:
        self._machines, self._degrees, self._deployment = machines, degrees, deployment
        self._kinds: dict[tuple[int, ...], _PricedKind] = {}
        self._operations: dict[Operation, float] = {}

    def segment(self, kinds: Sequence[SegmentKind], shares: Sequence[float]) -> _PricedKind:
        """The costs of a segment that mixes several kinds in these shares."""
        key = tuple(map(id, kinds))
        if key not in self._kinds:
            each, lost = zip(*map(self._stage, kinds), strict=True)
            stage = each[0] if len(each) == 1 else _in_proportion(each, shares)
            exchanged = sum(stage.lines(Kind(PHASES[at].value)).exchanged for at in _WHOLE_PASS)
            beside = sum(share * own for share, own in zip(shares, lost, strict=True)), exchanged
            phases = {phase: self._bytes(kinds, shares, at) for at, phase in enumerate(_KINDS)}
            offloadable = tuple(
                OffloadableBytes(round(self._degrees.amount(each.nbytes)), each.readers, each.received, each.sent)
                for each in (kinds[0].offloadable if len(kinds) == 1 else ())
            )
            self._kinds[key] = _PricedKind(stage, beside, phases, self._sent(kinds, shares), offloadable)
        return self._kinds[key]

    def _bytes(self, kinds: Sequence[SegmentKind], shares: Sequence[float], phase: int) -> PhaseBytes:
        def mean(sizes: Sequence[Size], experts: bool) -> int:
            own = [tuple(term for term in size if bool(term[2]) is experts) for size in sizes]
            return round(sum(share * self._degrees.amount(size) for size, share in zip(own, shares, strict=True)))

        read, made = [self._gathered(kind, phase) for kind in kinds], [kind.made[phase] for kind in kinds]
        derived = sum(share * self._derived(kind, phase) for kind, share in zip(kinds, shares, strict=True))
        return PhaseBytes(mean(read, False), mean(read, True), mean(made, False), mean(made, True), derived)

    def _gathered(self, kind: SegmentKind, phase: int) -> Size:
        """The parameters that a phase gathers; those of products in float8 may be cast before."""
        narrow = any(each.dtype.startswith("float8") for each, _ in kind.operations[phase])
        width = 0.5 if narrow and self._deployment.casts == "shards" else 1.0
        return tuple((*powers, width * amount) for *powers, amount in kind.read[phase])  # type: ignore[misc]

    def _sent(self, kinds: Sequence[SegmentKind], shares: Sequence[float]) -> Mapping[str, float]:
        found = dict.fromkeys(("tp", "ep", "cp"), 0.0)
        for kind, share in zip(kinds, shares, strict=True):
            for each, count in [pair for at in _WHOLE_PASS for pair in kind.operations[at]]:
                if each.kind in _EXCHANGES:
                    found[_ALONG[each.kind]] += share * count * self._exchange(each).sent
        return found

    def _stage(self, kind: SegmentKind) -> tuple[StageCosts, float]:
        """The costs of a kind, and the seconds that a forward and a backward lose beside all of their exchanges."""
        phases = [self._phase(kind, phase) for phase in range(len(PHASES))]
        on, back, first, second = phases
        amount = self._degrees.amount
        most = [round(max(map(amount, sizes), default=0.0)) for sizes in kind.peaks]
        both = 0.0
        if "backward" in self._deployment.overlapped and back.exchanged:
            gain = max(0.0, 1 - back.lost / back.exchanged) * min(back.exchanged, second.total - second.exchanged)
            both = min(_HIDDEN * gain, back.total - max(back.exchanged, back.host))
        stage = StageCosts(
            forward=on.total, backward=back.total - both, input_grad=first.total, weight_grad=second.total,
            saved_bytes=round(amount(kind.saved)), kept_bytes=round(amount(kind.kept)),
            peak_bytes=dict(zip(_KINDS, most, strict=True)), overlapped={Kind.B: both} if both else {},
            exchanged={kind: each.exchanged for kind, each in zip(_KINDS, phases, strict=True)},
        )  # fmt: skip
        return stage, on.lost + back.lost

    def _phase(self, kind: SegmentKind, phase: int) -> _Phase:
        total = exchanged = lost = launched = host = 0.0
        for each, count in kind.operations[phase]:
            if self._is_hoisted(each):
                continue
            seconds = count * self._once(each)
            total += seconds
            if each.kind in _EXCHANGES:
                exchanged += seconds
                lost += seconds * self._machines.contention(*self._group(each))
            launched += count * max(1 if self._deployment.compiled else len(each.parts), self._launches(each))
        if not self._deployment.compiled or self._deployment.single:  # kernels shorter than their launches wait for the host
            host = launched * self._machines.device.dispatch
        return _Phase(max(total, host), exchanged, lost, host)

    def _is_hoisted(self, each: Operation) -> bool:
        return each.derived and self._deployment.casts != "computation"

    def _derived(self, kind: SegmentKind, phase: int) -> float:
        if self._deployment.casts == "shards":  # so little for each rank that it is left out
            return 0.0
        return sum(count * self._once(each) for each, count in kind.operations[phase] if self._is_hoisted(each))

    def _once(self, each: Operation) -> float:
        if each not in self._operations:
            self._operations[each] = self._seconds(each)
        return self._operations[each]

    def _seconds(self, each: Operation) -> float:
        if each.kind in _EXCHANGES:
            return self._exchange(each).seconds
        return self._machines.slowest * self._kernel(each)

    def _kernel(self, each: Operation) -> float:
        device, nbytes, fused = self._machines.device, self._degrees.amount(each.nbytes), each.kind in _ATTENTIONS
        sides = self._sides(each)
        work = self._degrees.amount(each.flops, whole=fused)  # sequence parallelism does not divide attention
        if fused:
            return device.seconds(work, nbytes, each.dtype, each.kind)
        if each.parts and not self._deployment.compiled:
            return sum(device.seconds(0.0, self._degrees.amount(part), "") for part in each.parts)
        kind, one = ("grouped", 2 * prod(sides)) if each.grouped and sides else ("product", None)
        pieces = self._degrees.amount(each.pieces) if each.pieces else 1.0
        return pieces * device.seconds(work / pieces, nbytes / pieces, each.dtype, kind, side=min(sides, default=None), one=one)

    def _launches(self, each: Operation) -> float:
        """The kernels that the host launches for an operation: with `single`, one for each expert's product."""
        if not self._deployment.single:
            return 1.0
        if each.grouped and each.sides:
            return self._degrees.amount(each.flops) / (2 * prod(self._sides(each)))
        return self._degrees.amount(each.pieces) if each.pieces else 1.0

    def _sides(self, each: Operation) -> list[float]:
        degrees, folded = self._degrees, each.grouped and self._degrees.folded
        whole = replace(degrees, tp=1, cp=1) if folded else degrees  # a folded expert is whole, and has tokens of all ranks
        sides = [whole.amount(side) for side in each.sides]
        if each.grouped and sides:
            ragged = 0 if any(term[0] for term in each.sides[0]) else 2  # the side of the rows, which come from all ranks
            sides[ragged] *= self._degrees.ep
        return sides

    def _group(self, each: Operation) -> tuple[int, int]:
        """The ranks of an exchange, and their distance."""
        along = _ALONG[each.kind]
        if along == "ep" and self._degrees.folded:
            return self._degrees.expert_ranks, 1
        return getattr(self._degrees, along), 1 if along == "tp" else self._degrees.tp

    def _exchange(self, each: Operation) -> _Exchange:
        degrees, machines, along = self._degrees, self._machines, _ALONG[each.kind]
        ranks, stride = self._group(each)
        if ranks == 1 or each.when == ("shared" if degrees.folded else "folded"):
            return _Exchange(0.0, 0.0)
        nbytes = degrees.amount(each.nbytes, whole=along == "tp") * (ranks if along == "cp" else 1)
        times, seconds = (2 if each.kind == "all_reduce" else 1), machines.all_gather
        if each.kind == "all_reduce":
            seconds = machines.all_reduce
        elif each.kind == "all_to_all":
            seconds = partial(machines.all_to_all, chosen=self._deployment.chosen)
        hidden = 1 - (1 / ranks if along == "tp" else _SHOWN) if along in self._deployment.overlapped else 0.0
        shown = 1 - hidden + hidden * machines.contention(ranks, stride)
        return _Exchange(shown * seconds(nbytes, ranks, stride), times * nbytes * (ranks - 1) / ranks)


class _Phase(NamedTuple):
    """Seconds in all, of exchanges, of those that computations would lose beside all exchanges, and of the host's launches."""

    total: float
    exchanged: float
    lost: float
    host: float


class _Exchange(NamedTuple):
    seconds: float
    sent: float


_ATTENTIONS = ("attention", "attention_backward")
_ALONG = {"all_reduce": "tp", "all_gather": "tp", "all_to_all": "ep", "context": "cp"}
"""Mesh dimension of each kind of exchange."""
_EXCHANGES = tuple(_ALONG)


def _in_proportion(stages: Sequence[StageCosts], shares: Sequence[float]) -> StageCosts:
    def mean(values: Sequence[float]) -> float:
        return sum(value * share for value, share in zip(values, shares, strict=True))

    peaks = {kind: round(mean([stage.peak_bytes.get(kind, 0) for stage in stages])) for kind in stages[0].peak_bytes}
    return StageCosts(
        forward=mean([stage.forward for stage in stages]),
        backward=mean([stage.of(Kind.B) for stage in stages]),
        input_grad=mean([stage.input_grad for stage in stages]),
        weight_grad=mean([stage.weight_grad for stage in stages]),
        saved_bytes=round(mean([stage.saved_bytes for stage in stages])),
        kept_bytes=round(mean([stage.kept_bytes or 0 for stage in stages])),
        peak_bytes=peaks,
        exchanged={kind: mean([stage.lines(kind).exchanged for stage in stages]) for kind in _KINDS},
        overlapped={kind: mean([stage.lines(kind).both for stage in stages]) for kind in _KINDS},
    )
