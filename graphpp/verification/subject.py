"""Compile the pipeline that `graphpp.verify` checks, for any number of ranks, so that one process can run it.

- A schedule for several ranks is checked with all rows and messages. Then its computations run on one rank, in an order that is
  possible on the ranks.
- Programs are compiled for the shape of microbatch 0. If the caller gives one microbatch, the others have its rows in other
  orders, so that confusing microbatches changes the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphpp.arguments import positive_up_to, require, type_name
from graphpp.backends.choose_backend import compiler_of
from graphpp.batch.batch_dims import BatchDims
from graphpp.batch.cut_batch import BatchCutter
from graphpp.batch.microbatch import FlatMicrobatch
from graphpp.compiler.build import checked_programs
from graphpp.compiler.capture_once import Wanted, capture_graph, loaded_or_captured
from graphpp.compiler.compile_graph import CompiledGraph, compile_graph
from graphpp.compiler.compile_regions import RegionCache
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.word_stages import order_of_parts
from graphpp.errors import BatchError, GraphPPError, ScheduleError
from graphpp.options.options import Options
from graphpp.parallel.rank_place import RankPlace
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.lower import PassResult
from graphpp.planner.microbatch_count import microbatches_for
from graphpp.planner.tables import CheckedTable, ShardPolicy, Tables
from graphpp.runtime.messages.mailbox import message_flow
from graphpp.runtime.model_state import state_restored
from graphpp.runtime.program import PipelineProgram
from graphpp.schedules.generate.read import default_stages
from graphpp.schedules.table.actions import Action
from graphpp.schedules.table.in_order import has_inputs, in_order
from graphpp.schedules.table.schedule import Schedule
from graphpp.verification.runs import repeatable

_RANKS = positive_up_to(12)


@dataclass(frozen=True)
class SimulatedPlace(RankPlace):
    """One process that takes the place of `count` ranks."""

    count: int = 1
    shard_count: int | None = None

    @property
    def ranks(self) -> int:
        return self.count

    @property
    def shards(self) -> int | None:
        """The number of shards of each parameter on the ranks; this process has whole parameters."""
        return self.shard_count


@dataclass(frozen=True)
class Subject:
    """A pipeline under verification, and the graphs that it is compared with.

    `programs`: one per microbatch. `uncut`: the joint graph before the cut. `staged`: the graph of each stage and phase. `row`:
    the schedule on one rank. `backend`: whether a backend, which rounds differently, compiled the programs.
    """

    graph: CompiledGraph
    programs: Sequence[PipelineProgram]
    uncut: JointGraph
    staged: StagedGraphs
    row: Schedule
    backend: bool = False


def subject_of(request: CompileRequest, parts: Sequence[FlatMicrobatch]) -> Subject:
    """Compile the pipeline for these microbatches; restores the model. Raises the errors of `graphpp.compile`."""
    seen: dict[str, Any] = {}

    def watch(passed: PassResult) -> None:
        if passed.name == "capture":
            assert isinstance(passed.result, JointGraph)
            seen["uncut"] = repeatable(passed.result)
        elif isinstance(passed.result, StagedGraphs):
            seen["staged"] = passed.result

    request, options, place = replace(request, watch=watch), request.options, request.place
    shards = ShardPolicy(options.parallel.keep) if place.shards is not None else None
    tables, count = Tables(options.schedule, place.ranks, shards, message_flow(place.group, place.device)), len(parts)

    def table_for(stages: int) -> CheckedTable:
        return tables.checked(stages, count, True)

    words = order_of_parts(options, place.ranks, table_for)
    with state_restored(request.model, place.device):
        graph = compile_graph(request, loaded_or_captured(request, parts[0], words), table_for, None)
        stages = len(graph.program.stages)
        programs, _ = checked_programs(request, [graph] * count, table_for(stages), options.memory.caps(place.ranks))
        compiler = compiler_of(options.backend)
        if compiler is not None:
            regions = RegionCache(compiler, 0)
            programs, calls = regions.outlined([graph] * count, programs, range(stages))
            regions.compile(calls)
    row = in_one_row(table_for(stages).running)
    return Subject(graph, programs, seen["uncut"], seen["staged"], row, compiler is not None)


def uncut_graph(request: CompileRequest, part: FlatMicrobatch) -> JointGraph:
    """The joint graph for one microbatch, before the cut; restores the model. Raises `CaptureError`."""
    with state_restored(request.model, request.place.device):
        return repeatable(capture_graph(request, Wanted(part), True).joint)


def in_one_row(schedule: Schedule) -> Schedule:
    """The computations of all ranks on one rank, without messages, in an order that is possible on the ranks."""
    rows = [[action for action in row if action and action.is_compute] for row in schedule.table]
    row, done = list[Action](), set[Action]()
    for _, action in in_order(rows, lambda _, action: has_inputs(action, done, schedule.stages)):
        row.append(action)
        done.update(action.leaves)
    return replace(schedule, table=(tuple(row),))


def device_of(model: object) -> torch.device:
    """The device of the model's first parameter, else the CPU. Raises `GraphPPError` for anything but a module."""
    if not isinstance(model, nn.Module):
        raise GraphPPError(f"model must be an nn.Module, got {type_name(model)}")
    first = next(model.parameters(), None)
    return first.device if first is not None else torch.device("cpu")


def ranks_of(given: int | None, options: Options) -> int:
    """The number of ranks: `given`, else the table's rows, else as many as the split asks for, else 2."""
    if given is not None:
        require(ScheduleError, "ranks", _RANKS, given)
        return given
    if isinstance(options.schedule, Schedule):
        return options.schedule.ranks
    split, each = options.split, default_stages(options.schedule, 1)
    stages: int | None = split if isinstance(split, int) else getattr(split, "num_stages", None)
    if isinstance(split, Sequence) and not isinstance(split, str):
        stages = len(split) + all(isinstance(name, str) for name in split)
    if stages is None:  # only the captured graph can tell
        return 2
    return stages // each if stages % each == 0 else stages


def of_other_shapes(parts: Sequence[FlatMicrobatch]) -> list[int]:
    """Indices of microbatches that differ from microbatch 0 in shape or structure."""
    return [index for index, part in enumerate(parts) if part.signature != parts[0].signature]


def cut_as_in_a_step(batch: FlatMicrobatch, ranks: int, options: Options, dims: BatchDims) -> list[FlatMicrobatch]:
    """The microbatches into which `Pipeline.step` cuts a batch. Raises `BatchError`, also if it would not cut the batch."""
    cutter = BatchCutter(dims=dims)
    count = microbatches_for(options, ranks, cutter.rows(batch), Tables(options.schedule, ranks).admits)
    if count == 1 and options.microbatches.count is None:
        raise BatchError('against="whole batch": a step would not cut this batch, give microbatches=')
    return cutter.cut(batch, count)


def rotated(example: FlatMicrobatch, count: int, dims: BatchDims) -> list[FlatMicrobatch]:
    """`count` microbatches with the rows of `example`, each in another order."""
    _, along = dims.of_tensors(example)

    def turned(path: str, leaf: Any, by: int) -> Any:
        dim = along.get(path)
        return leaf if dim is None else leaf.clone().copy_(leaf.roll(by, dim))

    pairs = list(zip(example.paths, example.values, strict=True))
    turns = [tuple(turned(path, leaf, by) for path, leaf in pairs) for by in range(count)]
    return [dims.with_rows(replace(example, values=values)) for values in turns]


def moved_to(device: torch.device, part: FlatMicrobatch) -> FlatMicrobatch:
    values = [leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf for leaf in part.values]
    return replace(part, values=tuple(values))
