"""Where the stages of a captured graph start: the position of each stage's first operation (`planner/resolve_split.py`).

Under `memory.word_parts` rank r of a pipeline has part r of the head's words. The last stages are the parts of the head, and
where an embedding is tied to the head, the first stages are its parts; the order of execution follows from their ranks. One
process, which runs all stages, computes the parts in the order of the words. `SplitError` for options with which each rank
cannot have one part.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphpp._torch import aot
from graphpp.cache.disk_cache import DiskCache, default_folder
from graphpp.compiler.held_state import held_by_rank, state_bytes
from graphpp.compiler.program_variants import choices_of, variant_of
from graphpp.compiler.request import CompileRequest
from graphpp.compiler.time_programs import Stopwatch
from graphpp.errors import SplitError
from graphpp.options.options import Options
from graphpp.options.split import ModuleCall
from graphpp.passes.forward.cut_words import WordParts
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.passes.graph.op_costs import OpCosts
from graphpp.planner.auto_split import CutSearch
from graphpp.planner.microbatch_count import stages_of
from graphpp.planner.resolve_split import equal_layers, resolve
from graphpp.planner.segments import Pricing, places, seconds_by_operations, segments_of
from graphpp.planner.tables import CheckedTable
from graphpp.progress import working
from graphpp.runtime.parameter_rows import rows_in, whole_name
from graphpp.runtime.program import PipelineProgram, StageProgram
from graphpp.schedules.table.state_bytes import HeldBytes, StateBytes

_PART = re.compile(r"(?P<of>|.*\.)words\d+")

def resolved_starts(request: CompileRequest, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The stage starts that the option `split` asks for."""
    options, known = request.options, [name for name, _ in request.model.named_modules()]
    stages = None if options.split is not None else stages_of(options, request.place.ranks)
    if options.memory.word_parts is None or isinstance(options.split, Sequence):
        return resolve(options.split, calls, stages, known)
    total = options.split if isinstance(options.split, int) else stages
    assert total is not None, "the order of the parts was found"
    return with_parts(calls, total, lambda body: resolve(body, calls, None, known))


def with_parts(
    calls: Sequence[ModuleCall], stages: int, of_body: Callable[[int], tuple[int, ...]]
) -> tuple[int, ...]:
    """The starts of the parts of an embedding and of a head, and between them those of the other stages.

    `of_body`: the starts of so many stages over the whole forward, the first 0.
    """
    embedding, head = part_calls(calls)
    body = stages - len(embedding) - len(head)
    if body < 1:
        raise SplitError(
            f"memory.word_parts: {len(head)} stages are parts of the head, {len(embedding)} parts of its embedding, and "
            f"there are {stages} stages: ask for more, with split="
        )
    before = [0, *(call.position for call in embedding[1:]), embedding[-1].end] if embedding else [0]
    return (*before, *of_body(body)[1:], *(call.position for call in head))


def fastest_starts(
    request: CompileRequest, joint: JointGraph, calls: Sequence[ModuleCall], table: CheckedTable
) -> tuple[int, ...]:
    """The starts, among module calls, that are fastest in the simulation of a table."""
    options, place = request.options, request.place
    # The simulation counts gathers of layers separately.
    choices = replace(choices_of(request, joint, variant_of(request, table)), layers=None)

    def state(stages: Sequence[StageProgram]) -> tuple[StateBytes, ...]:
        return state_bytes(request, joint, stages)

    def held(state: Sequence[StateBytes]) -> tuple[HeldBytes, ...]:
        return held_by_rank(request, state, table)

    with working("searching where stages start"), aot.quick():
        segments = segments_of(joint, places(joint, calls), choices, timed_pricing(request), state)
        segments = replace(segments, costs=replace(segments.costs, flow=table.flow))
        embedding, head = part_calls(calls)
        ends = [*(call.position for call in embedding[1:]), embedding[-1].end] if embedding else []
        fixed = tuple(ends), tuple(call.position for call in head)
        search = CutSearch(segments, table.running, held, options.memory.caps(place.ranks), fixed)
        return search.starts(lambda: with_parts(calls, table.running.stages, lambda body: equal_layers(body, calls)))


def pricing_of(request: CompileRequest) -> Pricing:
    """Seconds of programs on this device, estimated from shapes or given by `parallel.op_costs`."""
    device = OpCosts.of(request.place.device.type)
    seconds = request.options.parallel.node_seconds() or device
    return Pricing(seconds_by_operations(seconds), device.message)


def timed_pricing(request: CompileRequest) -> Pricing:
    """Seconds of programs, timed by all ranks together or given by `parallel.op_costs`."""
    pricing, place = pricing_of(request), request.place
    if request.options.parallel.node_seconds() is not None:
        return pricing
    ranks, cache = place.agreement(place.everyone), DiskCache(default_folder())
    return replace(pricing, programs=Stopwatch(place.device, ranks, cache, pricing.programs))


def same_starts(boundaries: Sequence[Sequence[str]], calls: Sequence[ModuleCall]) -> tuple[int, ...]:
    """The positions of the first graph's boundaries in this graph.

    A call may have no operation here (dropout in evaluation): the stage then starts before the next call that has one.
    """
    positions = {call.fqn: call.position for call in calls}
    end = max((call.end for call in calls), default=0)
    return (0, *(next((positions[fqn] for fqn in names if fqn in positions), end) for names in boundaries))


# ------------------------------------------------------------------------------------------------- parts of words


def order_of_parts(
    options: Options, ranks: int, table_for: Callable[[int], CheckedTable], names: Iterable[str] = ()
) -> WordParts | None:
    """The order of execution of the parts; None without `memory.word_parts`. `names`: of the parameters of the first graph."""
    count = options.memory.word_parts
    if count is None:
        return None
    weight = next((whole_name(fqn) for fqn in names if rows_in(fqn) is not None), None)
    if ranks == 1:
        return WordParts(tuple(range(count)), tuple(range(count)), weight)
    if count != ranks:
        raise SplitError(f"memory.word_parts={count}: each rank has one part of the words, and the pipeline has {ranks} ranks")
    stages = _number_of_stages(options, ranks)
    if stages <= count:
        raise SplitError(
            f"memory.word_parts={count}: the parts are the last {count} stages, and there are {stages}: ask for more, such as "
            f"split={2 * ranks} with a schedule of two stages for each rank"
        )
    rank_of = table_for(stages).plain.rank_of_stage
    head, embedding = ([rank_of[stage] for stage in each] for each in (range(stages - count, stages), range(count)))
    if len(set(head)) < count:
        raise SplitError(
            f"memory.word_parts={count}: the schedule puts the last {count} of {stages} stages on the ranks {head}, and each "
            "rank must have one of them: take Interleaved1F1B, or another schedule of two stages for each rank"
        )
    return WordParts(tuple(head), tuple(embedding) if len(set(embedding)) == count else (), weight)


def _number_of_stages(options: Options, ranks: int) -> int:
    split = options.split
    if split is None or isinstance(split, str):
        return stages_of(options, ranks)
    if isinstance(split, Sequence):
        return len(split) + all(isinstance(name, str) for name in split)
    if isinstance(split, int):
        return split
    given = type(split).__name__
    raise SplitError(f"memory.word_parts: split= is a {given}, which knows no parts of words: give a number or FQNs")


def part_calls(calls: Sequence[ModuleCall]) -> tuple[list[ModuleCall], list[ModuleCall]]:
    """The parts of the embedding, if it is cut, and those of the head, in the order of execution."""
    groups: dict[str, list[ModuleCall]] = defaultdict(list)
    for call in calls:
        match = _PART.fullmatch(call.module)
        if match:
            groups[match["of"]].append(call)
    found = sorted(groups.values(), key=lambda group: group[0].position)
    return [call for group in found[:-1] for call in group], found[-1] if found else []


def check_parts(program: PipelineProgram, rank_of_stage: dict[int, int], ranks: int) -> None:
    """Raise `SplitError` unless each rank has the part of the words with its number."""
    names = sorted({fqn for stage in program.stages for fqn in stage.parameters if rows_in(fqn)}, key=_first_row)
    for fqn in dict.fromkeys(map(whole_name, names)):
        own = [name for name in names if whole_name(name) == fqn]
        for stage in program.stages:
            for name in {*stage.parameters}.intersection(own):
                number, rank = own.index(name), rank_of_stage[stage.index]
                if ranks > 1 and rank != number:
                    raise SplitError(
                        f"memory.word_parts: stage {stage.index} on rank {rank} has {name}, which belongs on rank {number}: "
                        "give split= a number, or list each part of the head, `words0`, `words1`, .., as the start of a stage"
                    )


def _first_row(name: str) -> int:
    rows = rows_in(name)
    assert rows is not None
    return rows.start
