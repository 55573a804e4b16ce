"""The times and bytes of a pipeline's actions: one description for the simulator, the scheduler and the profile.

Times are in seconds, or all in another unit; bytes are per microbatch. A stage's activations live from the start of its F to
the end of its B. With a split backward, `saved_bytes` live until the end of I, then `kept_bytes` until the end of W. Where an
R recomputes values, `saved_bytes` live until the start of R, and then the bytes of `ahead`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from math import inf
from numbers import Real
from typing import Any, NamedTuple

from graphpp.arguments import COUNT, FLAG, INDEX, NUMBER, Accepted, checked, one_of, or_none, require, shown
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, Kind


class Lines(NamedTuple):
    """The seconds of a program's computation, of its collectives, and of both at once, which both of the others contain: the
    program takes `computed + exchanged - both`."""

    computed: float
    exchanged: float
    both: float

    @property
    def in_sequence(self) -> float:
        return self.computed + self.exchanged


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage for one microbatch. `backward` is the time of a whole B; None: `input_grad` + `weight_grad`.

    `kept_bytes` None: as many as `saved_bytes`. By kind: `peak_bytes`, the most bytes alive while that program runs, with the
    values it received, saved and computes (missing: no more than it saves or has saved); `received_bytes`, the bytes that
    arrive from the neighbouring stage for an F, B or I; `sent_bytes`, the bytes of values for the neighbouring stage that share
    no memory with saved or kept values; `exchanged`, the seconds of the stage's own collectives, which computation of another
    part of an OVERLAP_F_B can hide (`Costs.together`); `overlapped`, the seconds of `exchanged` that computation of the same
    program hides. The time of a program includes its collectives but for the overlapped seconds.

    `backward`, `input_grad` and `weight_grad` include the recomputation of forward values, if there is any. `ahead`: the costs
    of the microbatches that have an R. Its `forward` and `peak_bytes[Kind.F]` are those of R, which leaves its `saved_bytes`
    behind; its other times and bytes are those of the B, I and W, which then recompute nothing.
    """

    forward: float = 1.0
    input_grad: float = 1.0
    weight_grad: float = 1.0
    backward: float | None = None
    saved_bytes: int = 1
    kept_bytes: int | None = None
    peak_bytes: Mapping[Kind, int] = field(default_factory=dict, hash=False)
    received_bytes: Mapping[Kind, int] = field(default_factory=dict, hash=False)
    sent_bytes: Mapping[Kind, int] = field(default_factory=dict, hash=False)
    exchanged: Mapping[Kind, float] = field(default_factory=dict, hash=False)
    overlapped: Mapping[Kind, float] = field(default_factory=dict, hash=False)
    ahead: StageCosts | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.ahead, StageCosts | None) or (self.ahead is not None and self.ahead.ahead is not None):
            raise ScheduleError(f"ahead of StageCosts: take StageCosts without `ahead`, or None, got {shown(self.ahead)}")
        for each in fields(self)[:-1]:
            given, by_kind = getattr(self, each.name), each.default is MISSING
            for number in given.values() if by_kind and isinstance(given, Mapping) else (given,):
                fits = isinstance(number, Real) and 0 <= number < inf and isinstance(given, Mapping) == by_kind  # type: ignore[operator]
                if not fits and not (number is None and each.default is None):
                    takes = f"finite numbers, 0 or more{', by kind of action' if by_kind else ''}"
                    raise ScheduleError(f"{each.name} of StageCosts: times and bytes are {takes}, got {shown(number)}")
        for kind, seconds in self.exchanged.items():
            whole = self.of(kind) if kind in _TIMED else 0.0
            if seconds > whole * (1 + _ROUNDING) or kind not in _TIMED:
                given = f"{seconds:g} of {kind}, which takes {whole:g}"
                raise ScheduleError(f"exchanged of StageCosts: take a part of the time of F, B, I or W, got {given}")
        for kind, seconds in self.overlapped.items():
            if kind not in _TIMED or seconds > self.exchanged.get(kind, 0.0) * (1 + _ROUNDING):
                given = f"{seconds:g} of {kind}, which exchanges {self.exchanged.get(kind, 0.0):g}"
                raise ScheduleError(f"overlapped of StageCosts: take a part of `exchanged`, got {given}")

    def change(self, kind: Kind) -> tuple[int, int]:
        """Change of the rank's live bytes at the start of an F, B, I or W, and at its end."""
        saved, kept = self.saved_bytes, self.bytes_after_input_grad
        before = {Kind.F: 0, Kind.B: saved, Kind.I: saved, Kind.W: kept}[kind]
        after = {Kind.F: saved, Kind.B: 0, Kind.I: kept, Kind.W: 0}[kind]
        running = self.running_bytes(kind)
        return running - before, after - running

    @property
    def bytes_after_input_grad(self) -> int:
        """The bytes alive from I to W."""
        return self.saved_bytes if self.kept_bytes is None else self.kept_bytes

    def running_bytes(self, kind: Kind) -> int:
        """The most bytes alive of a microbatch while an F, B, I or W runs."""
        least = self.bytes_after_input_grad if kind is Kind.W else self.saved_bytes
        return max(least, self.peak_bytes.get(kind, 0))

    @property
    def after_recompute(self) -> StageCosts:
        """`ahead`; raises `ScheduleError` if it is missing."""
        if self.ahead is None:
            raise ScheduleError("the table has an R of a stage, and its costs have no times of an R: give StageCosts.ahead")
        return self.ahead

    def of(self, kind: Kind, ahead: bool = False) -> float:
        """The time of one F, B, I, W or R; `ahead`: of a microbatch that has an R."""
        if kind == Kind.R:
            return self.after_recompute.forward
        if ahead and kind != Kind.F:
            return self.after_recompute.of(kind)
        whole = self.input_grad + self.weight_grad if self.backward is None else self.backward
        return {Kind.F: self.forward, Kind.B: whole, Kind.I: self.input_grad, Kind.W: self.weight_grad}[kind]

    def behind(self, seconds: float, peak_bytes: Mapping[Kind, int]) -> StageCosts:
        """These costs as `ahead`: behind an R of so many seconds, which runs no collectives."""
        own: list[dict[Kind, float]] = [{**self.exchanged}, {**self.overlapped}]
        for each in own:
            each.pop(Kind.F, None)
        return replace(self, forward=seconds, peak_bytes=peak_bytes, exchanged=own[0], overlapped=own[1])

    def lines(self, kind: Kind, ahead: bool = False) -> Lines:
        """One kind's seconds; of a B whose time is that of I and W, their collectives unless the B states its own."""
        if ahead and kind not in (Kind.F, Kind.R):
            return self.after_recompute.lines(kind)
        if not self.exchanged:
            return Lines(self.of(kind), 0.0, 0.0)
        derived = kind == Kind.B and kind not in self.exchanged and self.backward is None
        stating = (Kind.I, Kind.W) if derived else (kind,)
        exchanged, both = (sum(of.get(each, 0.0) for each in stating) for of in (self.exchanged, self.overlapped))
        return Lines(self.of(kind) + both - exchanged, exchanged, both)

    @property
    def in_sequence(self) -> StageCosts:
        """These costs where no program computes beside its own collectives."""
        named = {"forward": Kind.F, "backward": Kind.B, "input_grad": Kind.I, "weight_grad": Kind.W}
        stated = {name: kind for name, kind in named.items() if getattr(self, name) is not None or kind in self.overlapped}
        each: dict[str, Any] = {name: self.lines(kind).in_sequence for name, kind in stated.items()}
        return replace(self, **each, overlapped={}, ahead=None if self.ahead is None else self.ahead.in_sequence)


_TIME = Accepted("a finite number, 0 or more", lambda value: NUMBER.accepts(value) and 0 <= value < inf)  # type: ignore[operator]
_SHARE = Accepted("a share from 0 to 1", lambda value: NUMBER.accepts(value) and 0 <= value <= 1)  # type: ignore[operator]
_TIMES = Accepted(
    "a tuple of finite numbers, 0 or more", lambda value: isinstance(value, tuple | list) and all(map(_TIME.accepts, value))
)
_STAGES = Accepted(
    "a tuple of graphpp.StageCosts",
    lambda value: isinstance(value, tuple | list) and all(isinstance(each, StageCosts) for each in value),
)

_TIMED = (Kind.F, Kind.B, Kind.I, Kind.W)
_ROUNDING = 1e-6  # of a time: sums of segments differ in the last digits
DEPTH = 2
"""How many messages from one rank to another graphpp's transport has in flight at most."""


@dataclass(frozen=True)
class MessageFlow:
    """How long a transport keeps messages between stages.

    `ahead`: how many receives from one rank are posted before the first of them is read (0: each at its place in the table).
    `kept`: how many values sent to one rank keep their memory until a later send finds that they have left (0: free when the
    send returns).
    """

    ahead: int = 0
    kept: int = 0

    def __post_init__(self) -> None:
        for name in ("ahead", "kept"):
            require(ScheduleError, f"flow.{name}", INDEX, getattr(self, name))


@dataclass(frozen=True)
class Costs:
    """Costs of all stages and of the messages between them.

    `sends_forward[s]`: the time of a message from stage s to s + 1, `sends_backward[s]` from s + 1 to s; empty: messages take
    no time. `overlap`, `hidden`: the time of an OVERLAP_F_B, see `together`. `blocking`: a message occupies the sending and the
    receiving rank while it lasts (gloo on one thread); otherwise messages overlap with computations.
    `overhead`: the runner's own time before each action. `gathers[s]`: the time to gather the parameters of stage s (UNSHARD);
    `reductions[s]`: to sum its gradients over the ranks that share them (REDUCE_GRAD, or a RESHARD after a backward); empty:
    none. `flow`: how long messages take memory. `woven`: whether the parts of an OVERLAP_F_B run together, so that the bytes of
    all are alive at once; False: one after the other.
    """

    stages: tuple[StageCosts, ...]
    sends_forward: tuple[float, ...] = ()
    sends_backward: tuple[float, ...] = ()
    overlap: float = 1.0
    blocking: bool = False
    overhead: float = 0.0
    gathers: tuple[float, ...] = ()
    reductions: tuple[float, ...] = ()
    flow: MessageFlow = MessageFlow()
    woven: bool = True
    hidden: float = 0.9

    def __post_init__(self) -> None:
        require(ScheduleError, "stages", _STAGES, self.stages)
        for name in ("overlap", "overhead"):
            require(ScheduleError, name, _TIME, getattr(self, name))
        require(ScheduleError, "hidden", _SHARE, self.hidden)
        for name in ("sends_forward", "sends_backward", "gathers", "reductions"):
            times, stages = getattr(self, name), len(self.stages)
            kind, count = ("messages", max(stages - 1, 0)) if name.startswith("sends") else ("stages", stages)
            require(ScheduleError, name, _TIMES, times)
            if len(times) not in (0, count):
                raise ScheduleError(f"{name} has the times of {len(times)} {kind}, and there are {count}: give all, or none")

    @classmethod
    @checked(ScheduleError, stages=COUNT, ranks=or_none(COUNT), send=NUMBER, recompute=FLAG)
    def unit(cls, stages: int, ranks: int | None = None, send: float = 0.0, *, recompute: bool = False) -> Costs:
        """F = I = W = 1, and 1000 bytes of activations, for each *rank* and microbatch, divided evenly among its stages.

        `recompute`: F saves 100 bytes instead; R = 1 leaves 1000, and a B or I without an R takes 1 more.
        """
        per_rank = stages / (stages if ranks is None else ranks)
        one, nbytes = 1 / per_rank, round(1000 / per_rank)
        each = StageCosts(one, one, one, saved_bytes=nbytes)
        if recompute:
            peaks = dict.fromkeys((Kind.B, Kind.I), nbytes)
            each = StageCosts(one, 2 * one, one, saved_bytes=nbytes // 10, peak_bytes=peaks, ahead=each)
        return cls((each,) * stages, (send,) * (stages - 1), (send,) * (stages - 1))

    def of(self, action: Action) -> float:
        """The time for which a rank computes one action: 0 for anything but F, B, I, W and their overlaps."""
        if not action.is_compute:
            return 0.0
        leaves = [(leaf.stage, leaf.kind, False) for leaf in action.leaves]
        return self.together(leaves) if action.parts else self.stages[action.stage].of(action.kind)

    def together(self, parts: Sequence[tuple[int, Kind, bool]]) -> float:
        """The time of an OVERLAP_F_B of these (stage, kind, whether of a microbatch that has an R).

        The parts have one line for their computation and one for their collectives (`StageCosts.exchanged`), so an OVERLAP_F_B
        takes no less than all computation, all collectives, or the chain of a part, whose operations wait for each other: a
        forward, or the input gradients of a backward. Of the seconds that the sum of both lines exceeds the largest of
        these, the share `hidden` is saved, or as much as the parts save alone if that is more. `overlap` is a factor on the
        rest: where no stage states collectives, the fraction of the sum of the parts' times.
        """
        taken = [(self.stages[stage], kind, ahead) for stage, kind, ahead in parts]
        lines = [stage.lines(kind, ahead) for stage, kind, ahead in taken]
        chains = (stage.lines(Kind.I if kind == Kind.B else kind, ahead) for stage, kind, ahead in taken)
        computed, exchanged, both = map(sum, zip(*lines, strict=True))
        total, pairs = computed + exchanged, zip(lines, chains, strict=True)
        least = max(computed, exchanged, *(min(own.in_sequence, chain.in_sequence) for own, chain in pairs))
        return self.overlap * min(total - both, total - self.hidden * (total - least))

    @property
    def in_sequence(self) -> Costs:
        """These costs where parts run one after the other, and no program computes beside its own collectives."""
        return replace(self, overlap=1.0, hidden=0.0, woven=False, stages=tuple(each.in_sequence for each in self.stages))

    @property
    def saves(self) -> bool:
        """Whether an OVERLAP_F_B may take less time than its parts."""
        return self.overlap < 1 or (self.hidden > 0 and any(any(stage.exchanged.values()) for stage in self.stages))

    def message(self, sends: Sequence[float], boundary: int) -> float:
        """The time of a message between stages `boundary` and `boundary` + 1; `sends`: the times of one direction."""
        return sends[boundary] if sends else 0.0


def with_messages(stages: Sequence[StageCosts], forward: Sequence[int], backward: Sequence[int]) -> tuple[StageCosts, ...]:
    """The stages with the bytes that cross each boundary between them, which no saved value shares."""
    on, back = [0, *forward, 0], [0, *backward, 0]

    def moving(at: int) -> StageCosts:
        received = {Kind.F: on[at], Kind.B: back[at + 1], Kind.I: back[at + 1]}
        sent = {Kind.F: on[at + 1], Kind.B: back[at], Kind.I: back[at]}
        return replace(stages[at], received_bytes=received, sent_bytes=sent)

    return tuple(map(moving, range(len(stages))))


COSTS = one_of(Costs, takes="a graphpp.Costs, e.g. graphpp.Costs.unit(stages, ranks)")
