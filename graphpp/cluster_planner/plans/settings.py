"""One way to train a model on given machines: all choices of the search, as data."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from graphpp.arguments import COUNT, INDEX, NUMBER, TEXT, Accepted, or_none, require
from graphpp.cluster_planner.plans.mesh_shapes import MeshShape
from graphpp.errors import ScheduleError
from graphpp.schedules.check.checker import check
from graphpp.schedules.generate.megatron_interleaved import legal_groups, megatron_interleaved
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.table.schedule import Schedule

RecomputeWord = str | float | None
"""A form of `memory.recompute`: None, "selective", "full", or a fraction."""
ORDER = "searched"
"""The name of an order that `graphpp.schedule_auto` returned."""

_LAYERS = Accepted("a tuple of numbers of layers", lambda value: isinstance(value, tuple) and all(map(INDEX.accepts, value)))
_NAME = Accepted(
    f'the name of a schedule in graphpp.schedules.SCHEDULES, or "{ORDER}"', lambda value: value in SCHEDULES or value == ORDER
)
_RECOMPUTE = re.compile(r"\b[0-9]+R[0-9]")  # an R in the text of a table
PIECE = 256
"""The tokens whose logits exist at one time, where the search lets a head work in pieces."""
FRACTION = Accepted("a fraction above 0 and up to 1", lambda value: NUMBER.accepts(value) and 0 < value <= 1)  # type: ignore[operator]


@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule and its stages per rank. `group`: of `megatron_interleaved`, else None. `order`: text of the `Schedule` to
    run, for a "searched" one or a named one with moved weight gradients or recomputations. `stages`: of all ranks together,
    where a rank may have fewer than `stages_per_rank` (None: all have as many). Raises `ScheduleError`."""

    name: str
    stages_per_rank: int = 1
    group: int | None = None
    order: str | None = None
    stages: int | None = None

    def __post_init__(self) -> None:
        require(ScheduleError, "schedule", _NAME, self.name)
        require(ScheduleError, "stages_per_rank", COUNT, self.stages_per_rank)
        require(ScheduleError, "order", or_none(TEXT), self.order)
        require(ScheduleError, "stages", or_none(COUNT), self.stages)
        if self.name == ORDER and self.order is None:
            raise ScheduleError(f'order: a schedule "{ORDER}" has the text of its table')

    @classmethod
    def of(cls, order: Schedule) -> ScheduleChoice:
        most = max(Counter(order.rank_of_stage.values()).values())
        stages = None if order.stages == most * order.ranks else order.stages
        return cls(ORDER, most, order=str(order), stages=stages)

    def homes(self, ranks: int) -> list[int]:
        """The rank of each stage."""
        if self.order is not None:
            of_stage = Schedule.parse(self.order).rank_of_stage
            return [of_stage[stage] for stage in sorted(of_stage)]
        there = list(range(ranks))
        return there + there[::-1] if self.name in _OF_TWO and ranks > 1 else there * self.stages_per_rank

    def table(self, ranks: int, microbatches: int) -> Schedule:
        """Raises `ScheduleError` if the schedule does not admit these numbers."""
        stages = self.stages_on(ranks)
        if self.order is not None:
            table = Schedule.parse(self.order)
            check(table, ranks=ranks, stages=stages, microbatches=microbatches)
            most = max(Counter(table.rank_of_stage.values()).values())
            if most != self.stages_per_rank:
                raise ScheduleError(f"stages_per_rank: a rank of the order has {most} stages: give {most}")
            return table
        if stages != ranks * self.stages_per_rank:
            raise ScheduleError(f"stages: ranks have unlike numbers of stages under an order alone: leave out stages={stages}")
        if self.group is not None:
            return megatron_interleaved(ranks, stages, microbatches, group=self.group)
        return SCHEDULES[self.name](ranks, stages, microbatches)

    def stages_on(self, ranks: int) -> int:
        return ranks * self.stages_per_rank if self.stages is None else self.stages

    def __str__(self) -> str:
        name = "loop" if self.name == "auto" else self.name
        named = name if self.group is None else f"{name} in groups of {self.group}"
        if self.order is None:
            return named
        title, _, counts = self.order.partition("\n")[0].rpartition(": ")
        return title if counts.endswith("microbatches") else f"{named}, an order of its own"

    @property
    def recomputes_ahead(self) -> bool:
        """Whether the order has an R."""
        return self.order is not None and _RECOMPUTE.search(self.order) is not None


@dataclass(frozen=True)
class PlanSetting:
    """The choices of a search. `rows`: of a microbatch; `keep`: as `graphpp.Parallel(keep=)`; `recompute`: of each stage;
    `recomputed`: by stage, how many of its first layers `recompute` covers (None: all). `offload`: fraction of the saved bytes
    in host memory (None: none). `word_parts`: whether the head's words are cut over the ranks of the pipeline, as by
    `graphpp.Memory(word_parts=)`; `logits_tokens`: as `graphpp.Memory(logits_tokens=)`. Raises `ScheduleError`."""

    shape: MeshShape
    rows: int
    microbatches: int
    schedule: ScheduleChoice
    keep: int | None = None
    recompute: RecomputeWord = None
    recomputed: tuple[int, ...] | None = None
    offload: float | None = None
    word_parts: bool = False
    logits_tokens: int | None = None

    def __post_init__(self) -> None:
        require(ScheduleError, "rows", COUNT, self.rows)
        require(ScheduleError, "microbatches", COUNT, self.microbatches)
        require(ScheduleError, "offload", or_none(FRACTION), self.offload)
        require(ScheduleError, "logits_tokens", or_none(COUNT), self.logits_tokens)
        if self.offload is not None and isinstance(self.recompute, float):
            raise ScheduleError(f'offload: take recompute=None, "selective" or "full" beside it, got {self.recompute!r}')
        if self.recomputed is not None:
            require(ScheduleError, "recomputed", _LAYERS, self.recomputed)
            if len(self.recomputed) != self.stages or self.recompute not in ("selective", "full"):
                given = f"{len(self.recomputed)} beside recompute={self.recompute!r}"
                wanted = f'{self.stages} stages, beside recompute="selective" or "full"'
                raise ScheduleError(f"recomputed: give numbers of layers of {wanted}, got {given}")

    @property
    def stages(self) -> int:
        return self.schedule.stages_on(self.shape.pp)

    @property
    def degree(self) -> str:
        """The kind of recomputation and its number of layers, as text; "-" for none."""
        if self.recomputed is None:
            return str(self.recompute or "-")
        return f"{self.recompute} of {_counted(sum(self.recomputed), 'layer')}"

    def __str__(self) -> str:
        keep = "" if self.keep is None else f", keep {self.keep}"
        again = "" if self.recompute is None else f", recompute {self.degree}"
        cut = f"{_counted(self.microbatches, 'microbatch', 'es')} of {_counted(self.rows, 'row')}"
        away = "" if self.offload is None else f", offload {self.offload:g}"
        words = ", words cut" if self.word_parts else ""
        pieces = "" if self.logits_tokens is None else f", logits in pieces of {self.logits_tokens}"
        return f"{self.shape}, {_counted(self.stages, 'stage')}, {self.schedule}, {cut}{keep}{again}{away}{words}{pieces}"


def _counted(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending * (number > 1)}"


_COMPLICATIONS: Mapping[str, Callable[[PlanSetting], bool]] = {
    "offload": lambda setting: setting.offload is not None,
    "recomputation": lambda setting: setting.recompute is not None,
    "an order of its own": lambda setting: setting.schedule.order is not None,
    "a head in parts": lambda setting: setting.word_parts or setting.logits_tokens is not None,
}


def simplicity(setting: PlanSetting) -> tuple[int, ...]:
    """A sort key, the simplest first: without offload, without recomputation, with a named schedule, with a whole head, and
    then with fewer ranks in its largest collective."""
    return *(has(setting) for has in _COMPLICATIONS.values()), setting.shape.widest


def unlike(one: PlanSetting, other: PlanSetting) -> str:
    """The first part of `simplicity` that differs, in words about `one`; "" if none does."""
    for name, has in _COMPLICATIONS.items():
        if has(one) != has(other):
            return f"{'with' if has(one) else 'without'} {name}"
    ranks = one.shape.widest, other.shape.widest
    return f"with {ranks[0]} ranks in its largest collective, not {ranks[1]}" if ranks[0] != ranks[1] else ""


_OF_ONE = ("1F1B", "ZB1P", "ZB2P")
_OF_TWO = ("ZBVZeroBubble", "DualPipeV", "V-Half", "V-Min")
_OF_SEVERAL = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
INTERLEAVED = (*_OF_SEVERAL, "MegatronInterleaved")
SEVERAL = (2, 4, 8)
"""Stages per rank of `INTERLEAVED` schedules that the search tries."""
SEARCHED = ("auto", *_OF_ONE, *_OF_TWO, *INTERLEAVED)
"""The schedules that the search tries; "auto" is a plain loop, for one pipeline rank."""


def schedule_choices(ranks: int, microbatches: int, most_stages: int) -> Iterator[ScheduleChoice]:
    return (each for each in _choices(ranks, microbatches, most_stages) if admits(each, ranks, microbatches))


def admits(choice: ScheduleChoice, ranks: int, microbatches: int) -> bool:
    """Whether a schedule admits these numbers. Named ones are decided without their tables, which may take seconds to make."""
    if choice.order is not None:
        return table_of(choice, ranks, microbatches) is not None
    if choice.group is not None:
        return microbatches >= ranks and choice.group in legal_groups(ranks, microbatches)
    if choice.name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return microbatches % max(1, microbatches // ranks) == 0
    return choice.name != "DualPipeV" or microbatches >= 2 * ranks


def _choices(ranks: int, microbatches: int, most_stages: int) -> Iterator[ScheduleChoice]:
    if ranks == 1:
        yield ScheduleChoice("auto")
        if most_stages >= SEVERAL[-1]:  # a stage's gather and reduction run beside the computations of the next stages
            yield ScheduleChoice("auto", SEVERAL[-1])
        return
    yield from (ScheduleChoice(name) for name in _OF_ONE if ranks <= most_stages)
    if 2 * ranks <= most_stages:
        yield from (ScheduleChoice(name, 2) for name in _OF_TWO)
    for several in (each for each in SEVERAL if each * ranks <= most_stages):
        yield from (ScheduleChoice(name, several) for name in _OF_SEVERAL)
        groups = legal_groups(ranks, microbatches) if microbatches >= ranks else ()
        middle = [group for group in groups if ranks < group < microbatches]
        if middle:  # the middle one; the smallest is Interleaved1F1B, the largest LoopedBFS
            yield ScheduleChoice("MegatronInterleaved", several, middle[len(middle) // 2])


def table_of(choice: ScheduleChoice, ranks: int, microbatches: int) -> Schedule | None:
    """The table of a choice; None if the schedule does not admit the numbers."""
    try:
        return choice.table(ranks, microbatches)
    except ScheduleError:
        return None
