"""The bytes of weights, gradients, optimizer, buffers and activations on each rank of the pipeline.

Contract
    in   the stage programs, the metas of parameters and buffers, the bytes of the optimizer; the table that the ranks run
    out  `MemoryPlan`: each rank's bytes by kind and its peak; the bytes that a cap leaves for activations
    All bytes are derived from the graph and the table; nothing is measured or run. Not counted: workspaces of operators (except
    of products that are added to gradients); temporaries of compiled regions; the 8 MB all-reduce bucket (all gradients, if the
    caller keeps some of a bucket and drops others, or provides their memory); the transport's own memory; memory that the
    allocator keeps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphpp._torch.symbols import hint
from graphpp.arguments import Accepted, checked
from graphpp.errors import ScheduleError
from graphpp.options.memory import Memory
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.report.memory_view import MemoryView, RankBytes
from graphpp.report.text_table import text_table
from graphpp.runtime.fsdp.precision import Precision
from graphpp.runtime.parameter_rows import whole_name
from graphpp.runtime.program import StageProgram, TensorMeta
from graphpp.schedules.check.step_memory import StepPeak
from graphpp.schedules.table.state_bytes import StateBytes
from graphpp.units import spell_bytes

_CAP = Accepted(
    "bytes, or a sequence with the bytes of each rank",
    lambda value: all(type(each) is int and each > 0 for each in (value if isinstance(value, list | tuple) else [value])),
)
_KINDS = ("weights", "gradients", "shards", "optimizer", "buffers", "messages", "activations")
_USUAL: Mapping[str, int] = {}  # of parameters on the usual ranks
_USED = ("weights", "gradients", "optimizer", "activations")  # columns of every table


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes: the maximum of each kind over a step, and `peak`, the maximum of their sum.

    `weights`, `gradients`: unsharded; `weights` include values computed from parameters once per step. `shards`: of parameters
    and gradients, under `dp_shard`. `messages`: values in transfer between pipeline ranks, and gradients in a reduction.
    `activations`: values that wait for their backward or for the next stage on the same rank, and values alive within a
    program.
    """

    rank: int
    weights: int = 0
    gradients: int = 0
    shards: int = 0
    optimizer: int = 0
    buffers: int = 0
    messages: int = 0
    activations: int = 0
    peak: int = 0

    @property
    def state(self) -> int:
        return sum(getattr(self, kind) for kind in _KINDS if kind != "activations")


@dataclass(frozen=True)
class MemoryPlan:
    """The bytes of each rank. `state`: the model's, by stages; `optimizer`: `memory.optimizer` (None: unknown)."""

    ranks: tuple[RankMemory, ...]
    state: tuple[StateBytes, ...] = ()
    optimizer: str | float | None = None

    @classmethod
    def of(cls, peaks: Sequence[StepPeak], state: Sequence[StateBytes], optimizer: str | float | None = None) -> MemoryPlan:
        return cls(tuple(RankMemory(each.rank, **each.most, peak=each.nbytes) for each in peaks), tuple(state), optimizer)

    @checked(ScheduleError, cap=_CAP)
    def room(self, cap: int | Sequence[int]) -> tuple[int, ...]:
        """The bytes that a cap leaves for activations on each rank, for `graphpp.schedule_auto(memory_cap=)`.

        `cap`: for all ranks, or one for each. Raises `ScheduleError` if the other bytes alone reach the cap.
        """
        caps = [cap] * len(self.ranks) if isinstance(cap, int) else list(cap)
        if len(caps) != len(self.ranks):
            raise ScheduleError(f"cap: take one number of bytes, or one for each of {len(self.ranks)} ranks, got {cap!r}")
        for own, most in zip(self.ranks, caps, strict=True):
            if own.state >= most:
                held = f"rank {own.rank} has {own.state:,} bytes of weights, gradients, optimizer and buffers"
                raise ScheduleError(f"cap: {held}, and a cap of {most:,} leaves none for activations: raise the cap")
        return tuple(most - own.state for own, most in zip(self.ranks, caps, strict=True))

    @property
    def view(self) -> MemoryView:
        """The bytes of each rank for a report page."""
        kinds = tuple(kind for kind in _KINDS if any(getattr(each, kind) for each in self.ranks))
        ranks = (RankBytes(each.rank, tuple(getattr(each, kind) for kind in kinds), each.peak) for each in self.ranks)
        note = "Each kind at its most, which are not all at one time: the most at one time stands in the table, under together."
        return MemoryView(kinds, tuple(ranks), note=note, head="The most of each kind in a step")

    def __str__(self) -> str:
        kinds = [kind for kind in _KINDS if kind in _USED or any(getattr(each, kind) for each in self.ranks)]
        rows = [
            (str(each.rank), *(spell_bytes(getattr(each, kind)) for kind in kinds), spell_bytes(each.peak))
            for each in self.ranks
        ]
        said = f"; memory.optimizer={self.optimizer!r}" if self.optimizer is not None else ""
        caption = f"together: the most at one time{said}"
        return text_table(("rank", *kinds, "together"), rows, title="memory in a training step", caption=caption)


@dataclass(frozen=True)
class StateDtypes:
    """The dtypes of a model's state. `own`: of each parameter and its shards, by FQN; `sums`: in which narrower gradients are
    summed; `precision`: of whole parameters and messages."""

    own: Mapping[str, torch.dtype]
    sums: torch.dtype | None = None
    precision: Precision = Precision()

    def of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which gradients of a parameter of this dtype are summed."""
        return dtype if self.sums is None else torch.promote_types(dtype, self.sums)


def state_of(
    joint: JointGraph,
    stages: Sequence[StageProgram],
    dtypes: StateDtypes,
    memory: Memory,
    ranks_of: Mapping[str, Mapping[str, int]] | None = None,
) -> tuple[StateBytes, ...]:
    """Bytes of a model's state, by the stages that read it. `ranks_of`: by FQN, `shards` or `averaged_over` if not the usual
    ones."""
    readers, makers = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for stage in stages:
        for fqn in (*stage.parameters, *stage.buffers):
            readers[fqn].append(stage.index)
        for fqn in stage.gradients:
            makers[fqn].append(stage.index)
    found: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[tuple[str, int], ...]], StateBytes] = {}

    def add(stages: Sequence[int], made_by: Sequence[int], more: Mapping[str, int], ranks: Mapping[str, int] = _USUAL) -> None:
        key = tuple(stages), tuple(made_by), tuple(ranks.items())
        before = found.get(key) or StateBytes(*key[:2], shards=ranks.get("shards"), averaged_over=ranks.get("averaged_over"))
        total: dict[str, Any] = {kind: (getattr(before, kind) or 0) + nbytes for kind, nbytes in more.items()}
        found[key] = replace(before, **total)

    for fqn, stages_of in readers.items():
        meta = joint.parameters.get(fqn)
        if fqn in joint.buffers or meta is None:
            add(stages_of, (), {"buffers": joint.buffers[fqn].nbytes})
        else:
            nbytes = _of_parameter(meta, bool(makers[fqn]), dtypes, memory)
            add(stages_of, makers[fqn], nbytes, (ranks_of or {}).get(fqn, _USUAL))
    for stage in stages:
        constants = sum(tensor.nbytes for tensor in stage.constants.values())
        hoisted = sum(map(hint, stage.hoisted.live)) if stage.hoisted is not None else 0
        if constants or hoisted:
            add((stage.index,), (), {"buffers": constants, "derived": hoisted})
    return tuple(found.values())


def _of_parameter(meta: TensorMeta, trained: bool, dtypes: StateDtypes, memory: Memory) -> dict[str, int]:
    """The bytes of a parameter; `meta` comes from the graph, whose dtype may differ from the parameter's own."""
    own, elements = dtypes.own[whole_name(meta.name)], meta.nbytes // meta.dtype.itemsize
    rows = elements * own.itemsize
    if not trained:
        return {"weights": meta.nbytes, "rows": rows, "row_sums": 0, "sent": 0}
    sums = dtypes.of_sums(meta.dtype)
    return {
        "weights": meta.nbytes,
        "sums": elements * sums.itemsize,
        "rounded": rows if dtypes.of_sums(own) is not own else 0,
        "optimizer": memory.optimizer_bytes(elements, own.itemsize),
        "rows": rows,
        "row_sums": elements * dtypes.of_sums(own).itemsize,
        "sent": elements * dtypes.precision.of_messages(sums).itemsize,
    }
