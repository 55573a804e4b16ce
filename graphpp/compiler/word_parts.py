"""Where the parts of a head's words run under `memory.word_parts`: rank r of a pipeline has part r.

- The last stages are the parts of the head, and where an embedding is tied to the head, the first stages are its parts. The
  order of execution follows from the ranks of these stages.
- One process, which runs all stages, computes the parts in the order of the words.
- `SplitError` for options with which each rank cannot have one part.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from graphpp.errors import SplitError
from graphpp.options.options import Options
from graphpp.options.split import ModuleCall
from graphpp.passes.forward.cut_words import WordParts
from graphpp.planner.microbatch_count import stages_of
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.parameter_rows import rows_in, whole_name
from graphpp.runtime.program import PipelineProgram

if TYPE_CHECKING:
    from graphpp.compiler.compile_graph import CompiledGraph

_PART = re.compile(r"(?P<of>|.*\.)words\d+")


def order_of_parts(
    options: Options, ranks: int, table_for: Callable[[int], CheckedTable], first: CompiledGraph | None
) -> WordParts | None:
    """The order of execution of the parts; None without `memory.word_parts`. `first`: the pipeline's first graph."""
    count = options.memory.word_parts
    if count is None:
        return None
    names = () if first is None else first.captured.joint.parameters
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
