"""What `graphpp.verify` runs: the programs of a pipeline of any number of ranks, and its schedule on one rank.

Contract
--------
- A schedule for several ranks is checked as such, its messages included; then its computations stand on one rank in an
  order that the ranks could have had.
- Microbatches have one shape. Where one is given for all, the others have its rows in other orders, so that one taken for
  another shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphpp.backends.compilers import compiler_of
from graphpp.batch.cut_batch import leading_size
from graphpp.batch.microbatch import FlatMicrobatch, Microbatch, flatten_microbatch
from graphpp.capture.trace import LossFunction
from graphpp.compiler.build import Built, Compiler
from graphpp.compiler.compile_regions import CompiledPrograms
from graphpp.errors import BatchError, GraphPPError, ScheduleError
from graphpp.options.options import Options
from graphpp.parallel.place import RankPlace
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.lower import PassResult
from graphpp.runtime.model_state import state_restored
from graphpp.runtime.program import PipelineProgram
from graphpp.schedules.generate.read import default_stages
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.in_order import has_inputs, in_order
from graphpp.schedules.table.schedule import Schedule
from graphpp.verification.runs import repeatable


@dataclass(frozen=True)
class SimulatedPlace(RankPlace):
    """One process that stands for several ranks."""

    count: int = 1

    @property
    def ranks(self) -> int:
        """Ranks that the schedule is for."""
        return self.count


@dataclass(frozen=True)
class Compiled:
    """What a pipeline would run, and beside it the uncut graph, the graphs of the cut, and the schedule on one rank.

    `backend`: the programs are compiled, and so round otherwise.
    """

    built: Built
    programs: Sequence[PipelineProgram]
    uncut: JointGraph
    staged: StagedGraphs
    row: Schedule
    backend: bool = False


def compiled_for(
    model: nn.Module, loss: LossFunction | None, options: Options, place: RankPlace, parts: Sequence[FlatMicrobatch]
) -> Compiled:
    """All that is compared for these microbatches; changes nothing of the model. Raises what `graphpp.compile` raises."""
    seen: dict[str, Any] = {}

    def watch(passed: PassResult) -> None:
        if passed.name == "capture":
            assert isinstance(passed.result, JointGraph)
            seen["uncut"] = repeatable(passed.result)
        elif isinstance(passed.result, StagedGraphs):
            seen["staged"] = passed.result

    compiler = Compiler(model, loss, options, place, watch)
    with state_restored(model, place.device):
        built = compiler.build(parts[0], len(parts), training=True)
        table = compiler.schedule([built] * len(parts), training=True)
        programs = [compiler.program(built, table, index) for index in range(len(parts))]
        region_compiler = compiler_of(options.backend)
        if region_compiler is not None:
            local = range(len(built.program.stages))
            programs = CompiledPrograms(region_compiler, 0).compile([(built, each) for each in programs], local)
    backend = region_compiler is not None
    return Compiled(built, programs, seen["uncut"], seen["staged"], in_one_row(table), backend)


def in_one_row(schedule: Schedule) -> Schedule:
    """The computations of all ranks on one rank: an order that the ranks could have had, without messages."""
    rows = [[action for action in row if action and action.is_compute] for row in schedule.table]
    row, done = list[Action](), set[Action]()
    for _, action in in_order(rows, lambda _, action: has_inputs(action, done, schedule.stages)):
        row.append(action)
        done.update(action.leaves)
    return replace(schedule, table=(tuple(row),))


def device_of(model: object) -> torch.device:
    if not isinstance(model, nn.Module):
        raise GraphPPError(f"model must be an nn.Module, got {type(model).__name__}")
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def ranks_of(given: int | None, options: Options) -> int:
    """How many ranks the schedule is for."""
    if given is not None:
        if given < 1:
            raise ScheduleError(f"ranks must be a positive number, got {given!r}")
        return given
    if isinstance(options.schedule, Schedule):
        return options.schedule.ranks
    stages, each = _stages(options.split), default_stages(options.schedule, 1)
    if stages is None:
        return 2
    return stages // each if stages % each == 0 else stages


def _stages(split: Any) -> int | None:
    """How many stages a split asks for, where it says so by itself."""
    if isinstance(split, Sequence):
        return len(split) + all(isinstance(name, str) for name in split)
    number = split if split is None or isinstance(split, int) else getattr(split, "num_stages", None)
    return number if number is None else int(number)


def check_one_shape(parts: Sequence[FlatMicrobatch]) -> None:
    other = next((index for index, part in enumerate(parts) if part.signature != parts[0].signature), None)
    if other is not None:
        raise BatchError(
            f"microbatch {other} differs in shape or structure from microbatch 0: verify microbatches of one shape at a time."
        )


def rotated(example: Microbatch, count: int) -> list[FlatMicrobatch]:
    """Microbatches of the same rows in other orders, so that one taken for another shows."""
    leaves = FlatMicrobatch.of(example)
    rows = leading_size(leaves)

    def turned(leaf: Any, by: int) -> Any:
        rolls = isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == rows
        return leaf.clone().copy_(leaf.roll(by, 0)) if rolls else leaf

    turns = [tuple(turned(leaf, by) for leaf in leaves.values) for by in range(count)]
    return [flatten_microbatch(FlatMicrobatch(leaves.spec, leaves.paths, values).microbatch()) for values in turns]


def moved_to(device: torch.device, part: FlatMicrobatch) -> FlatMicrobatch:
    values = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in part.values]
    return FlatMicrobatch(part.spec, part.paths, tuple(values))
