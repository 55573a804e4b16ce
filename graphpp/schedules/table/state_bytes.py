"""The bytes of a model's state (parameters, gradients, optimizer, buffers), and each rank's part during a step.

- In: `StateBytes`, state grouped by the stages that read it; the rank of each stage; the number of shards. Out: `HeldBytes` of
  each rank: bytes for the whole step, and bytes that come and go with the actions of sharded stages.
- A rank has a parameter once, however many of its stages read it. A tied parameter has a sum of gradients in each stage that
  makes one, and one more at the end of the step. Without sharding, gradients count for the whole step, since `param.grad` keeps
  their memory.
- With sharding, a rank always has shards of the parameters and of the sums, rows rounded up. Whole parameters are freed when
  their stages are resharded (`frees`), or stay; whole sums are freed when they are reduced. If computations gather single
  layers (`layers`), whole parameters and gradients come and go within each of them.
- If gradients are averaged over several ranks in rank order, a rank receives as many bytes as the sum has, which stay until the
  gradients of the step are finished.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter

from graphpp.arguments import COUNT, INDEX, Accepted, require
from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Kind

_IN_PLACE = 2  # ranks that add up in place: the sum of two numbers does not depend on their order
_USUAL = ("rows", "row_sums", "sent", "shards", "averaged_over")  # fields where None means the value of other state
_STAGES = Accepted("a tuple of stages", lambda value: isinstance(value, tuple | list) and all(map(INDEX.accepts, value)))
_BYTES = Accepted("bytes, an integer from 0", lambda value: type(value) is int and value >= 0)
_ACCEPTED = {  # by field; all other fields are bytes
    "readers": _STAGES, "makers": _STAGES, "shards": COUNT, "averaged_over": COUNT,
}  # fmt: skip


@dataclass(frozen=True)
class StateBytes:
    """The state that the same stages read, in bytes. Raises `ScheduleError` for other values, and for a maker that is no
    reader.

    `readers`: the stages that read it; `makers`: the readers that make gradients of its parameters. `weights`: parameters;
    `sums`: their gradients as one stage sums them; `rounded`: their gradients in `param.grad` if the sums are wider, else 0;
    `optimizer`: the optimizer's state; `derived`: values computed from parameters once per step. Of shards: `rows`: the
    parameters (None: `weights`); `row_sums`: the sums of gradients (None: `sums`); `sent`: the sums as one stage sends them
    (None: `sums`); `shards`: over how many ranks (None: as other state). `averaged_over`: over how many ranks the gradients are
    averaged, if fewer ranks have these parameters than others (None: as other state).
    """

    readers: tuple[int, ...]
    makers: tuple[int, ...] = ()
    weights: int = 0
    sums: int = 0
    rounded: int = 0
    optimizer: int = 0
    buffers: int = 0
    derived: int = 0
    rows: int | None = None
    row_sums: int | None = None
    sent: int | None = None
    shards: int | None = None
    averaged_over: int | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None or item.name not in _USUAL:
                require(ScheduleError, item.name, _ACCEPTED.get(item.name, _BYTES), value)
        if not set(self.makers) <= set(self.readers) or not self.readers:
            raise ScheduleError(f"{self}: the stages that make gradients are some of the stages that read the parameters")


STATE = Accepted(
    "a list of graphpp.StateBytes",
    lambda value: isinstance(value, list | tuple) and all(isinstance(each, StateBytes) for each in value),
)


@dataclass(frozen=True)
class LayerBytes:
    """The most bytes of a layer while a computation runs: whole parameters, whole gradients, gradients as they are sent."""

    whole: int = 0
    gradients: int = 0
    sent: int = 0


Layers = Mapping[tuple[int, Kind], LayerBytes]  # by stage and kind of computation


@dataclass(frozen=True)
class HeldBytes:
    """The bytes of state on one rank during a step.

    `standing`: by kind, for the whole step. `whole`: (stages, bytes) of parameters that are whole while any of these stages is.
    `gradients`: by stage, the sums from its first backward until they are reduced; `sent`: by stage, the sums as sent.
    `waiting`: by stage, the gradients of one microbatch, which wait for those of earlier microbatches; with `layers`, the
    rank's rows of them in the dtype of the sums. `at_end`: in addition, while the gradients of the step are finished. `layers`:
    for computations that gather single layers. `averaged`: by stage, parts of averages received from the stage's reduction on.
    """

    standing: Mapping[str, int] = field(default_factory=dict)
    whole: tuple[tuple[frozenset[int], int], ...] = ()
    gradients: Mapping[int, int] = field(default_factory=dict)
    sent: Mapping[int, int] = field(default_factory=dict)
    waiting: Mapping[int, int] = field(default_factory=dict)
    at_end: int = 0
    layers: Layers = field(default_factory=dict)
    averaged: Mapping[int, int] = field(default_factory=dict)


def held_bytes(
    state: Sequence[StateBytes],
    rank_of_stage: Mapping[int, int],
    ranks: int,
    shards: int | None = None,
    frees: bool = False,
    layers: Layers | None = None,
    *,
    in_order: bool = False,
    averaged_over: int = 1,
) -> tuple[HeldBytes, ...]:
    """The state on each rank.

    `shards`: over how many ranks parameters are sharded (None: not); `frees`: whether resharding frees whole parameters;
    `layers`: the bytes of computations that gather single layers (None: whole stages are gathered). `in_order`: whether
    gradients add up in microbatch order, so that an early one waits. `averaged_over`: over how many ranks gradients are
    averaged in rank order (1: in another order, or not).
    """
    found = [_OnRank(rank, state, rank_of_stage, in_order, averaged_over) for rank in range(ranks)]
    if shards is not None and layers is not None:
        return tuple(each.by_layers(shards, layers) for each in found)
    return tuple(each.whole() if shards is None else each.sharded(shards, frees) for each in found)


def sent_by_stage(state: Sequence[StateBytes], stages: int, shards: int) -> tuple[list[float], list[float]]:
    """By stage, the bytes that a rank sends when the stage is gathered, and when it is reduced: all but its own part."""
    gathered, reduced = Counter[int](), Counter[int]()
    for each in state:
        ranks = each.shards or shards
        gathered.update(dict.fromkeys(each.readers, each.weights * (ranks - 1) / ranks))
        reduced.update(dict.fromkeys(each.makers, _sent(each) * (ranks - 1) / ranks))
    return [gathered[stage] for stage in range(stages)], [reduced[stage] for stage in range(stages)]


class _OnRank:
    """The state of one rank's stages."""

    def __init__(
        self, rank: int, state: Sequence[StateBytes], rank_of_stage: Mapping[int, int], in_order: bool, averaged_over: int
    ) -> None:
        self._rank, self._rank_of, self._in_order, self._averaged_over = rank, rank_of_stage, in_order, averaged_over
        self._own = [each for each in state if any(rank_of_stage[stage] == rank for stage in each.readers)]

    def whole(self) -> HeldBytes:
        standing = {"weights": self._weights(), "gradients": sum(self._by_stage(_sums).values()), **self._rest(1)}
        averaged = self._by_stage(lambda each: 0 if self._is_tied(each) else _sums(each), self._in_parts)
        tied = sum(_sums(each) for each in self._own if each.makers and self._is_tied(each) and self._in_parts(each))
        at_end = sum(self._at_end_of(each, _sums) for each in self._own) + tied
        return HeldBytes(standing, waiting=self._waiting(_of_microbatch), at_end=at_end, averaged=averaged)

    def by_layers(self, shards: int, layers: Layers) -> HeldBytes:
        """The bytes of a rank with shards that gathers single layers."""
        derived = sum(each.derived for each in self._own)
        standing = {"shards": self._shards(shards), "weights": derived, **self._rest(shards)}
        waiting = self._waiting(lambda each: -(-_row_sums(each) // (each.shards or shards)))
        return HeldBytes(standing, waiting=waiting, at_end=self._at_end(shards), layers=layers)

    def sharded(self, shards: int, frees: bool) -> HeldBytes:
        kept = self._shards(shards)
        standing = {"shards": kept, **({} if frees else {"weights": self._weights()}), **self._rest(shards)}
        pieces = ((frozenset(self._local(each.readers)), each.weights + each.derived) for each in self._own) if frees else ()
        at_end, whole = self._at_end(shards, self._is_tied), tuple(piece for piece in pieces if piece[1])
        untied = lambda each: self._in_parts(each) and not self._is_tied(each)  # noqa: E731
        averaged = self._by_stage(lambda each: -(-_row_sums(each) // (each.shards or shards)), untied)
        sums = self._by_stage(_sums), self._by_stage(_sent), self._waiting(_of_microbatch)
        return HeldBytes(standing, whole, *sums, at_end, averaged=averaged)

    def _waiting(self, nbytes: Callable[[StateBytes], int]) -> dict[int, int]:
        """By stage, the gradients of one microbatch that wait for those of earlier microbatches."""
        return self._by_stage(nbytes) if self._in_order else {}

    def _shards(self, shards: int) -> int:
        """The rows of parameters and of the sums of gradients."""
        rows = sum(-(-(each.weights if each.rows is None else each.rows) // (each.shards or shards)) for each in self._own)
        sums = ((each.shards, len(self._local(each.makers)) * _row_sums(each)) for each in self._own)
        return rows + sum(self._parts(sums, shards))

    def _local(self, stages: Sequence[int]) -> list[int]:
        return [stage for stage in stages if self._rank_of[stage] == self._rank]

    def _weights(self) -> int:
        return sum(each.weights + each.derived for each in self._own)

    def _rest(self, shards: int) -> dict[str, int]:
        optimizer = sum(-(-each.optimizer // (each.shards or shards)) for each in self._own)
        return {"optimizer": optimizer, "buffers": sum(each.buffers for each in self._own)}

    def _by_stage(
        self, nbytes: Callable[[StateBytes], int], counts: Callable[[StateBytes], bool] = lambda each: True
    ) -> dict[int, int]:
        found = Counter[int]()
        for each in filter(counts, self._own):
            found.update(dict.fromkeys(self._local(each.makers), nbytes(each)))
        return dict(found)

    def _parts(self, pieces: Iterable[tuple[int | None, int]], shards: int) -> list[int]:
        """A rank's part of whole bytes, rounded up once for each number of shards."""
        found = Counter[int]()
        for own, nbytes in pieces:
            found[own or shards] += nbytes
        return [-(-nbytes // ranks) for ranks, nbytes in found.items()]

    def _at_end(self, shards: int, late: Callable[[StateBytes], bool] = lambda each: True) -> int:
        """The bytes of a rank with shards while the gradients of the step are finished. `late`: of which state the parts of
        averages arrive then."""
        taken = ((each.shards, self._at_end_of(each, _row_sums)) for each in self._own)
        averaged = ((each.shards, _row_sums(each)) for each in self._own if each.makers and self._in_parts(each) and late(each))
        return sum(self._parts([*taken, *averaged], shards))

    def _at_end_of(self, each: StateBytes, sums: Callable[[StateBytes], int]) -> int:
        return each.rounded + self._tied(each, sums(each)) if each.makers else 0

    def _tied(self, each: StateBytes, total: int) -> int:
        """The total of a tied parameter's sums, and the sums that arrive from other ranks."""
        arriving = len(each.makers) - len(self._local(each.makers)) if self._on_several_ranks(each) else 0
        return total * (self._is_tied(each) + arriving)

    def _in_parts(self, each: StateBytes) -> bool:
        """Whether an average over ranks with the same parameters receives a part of a sum from each of them."""
        return min(self._averaged_over, each.averaged_over or self._averaged_over) > _IN_PLACE

    def _is_tied(self, each: StateBytes) -> bool:
        """Whether partial sums of several stages, or for several ranks, are added up at the end of the step."""
        return self._on_several_ranks(each) or len(each.makers) > 1

    def _on_several_ranks(self, each: StateBytes) -> bool:
        return len({self._rank_of[stage] for stage in each.readers}) > 1


_of_microbatch = attrgetter("weights")  # the gradients of one microbatch have the dtype of the parameters
_sums = attrgetter("sums")


def _row_sums(each: StateBytes) -> int:
    return each.sums if each.row_sums is None else each.row_sums


def _sent(each: StateBytes) -> int:
    return each.sums if each.sent is None else each.sent
