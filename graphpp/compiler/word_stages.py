"""The stages that are parts of a head's words (`memory.word_parts`): rank r of a pipeline has part r.

- The last stages are the parts of the head, and where an embedding is tied to the head, the first stages are its parts
  (`passes/forward/cut_words.py`). The order of execution of the parts follows from the ranks of these stages.
- One process, which runs all stages, computes the parts in the order of the words.
- `SplitError` for options with which each rank cannot have one part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphpp.errors import SplitError
from graphpp.options.options import Options
from graphpp.options.split import ModuleCall
from graphpp.passes.forward.cut_words import HEAD, LOOKUP, WordParts
from graphpp.planner.microbatch_count import stages_of
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.parameter_rows import rows_in, whole_name
from graphpp.runtime.program import PipelineProgram


def order_of_parts(
    options: Options, ranks: int, table_for: Callable[[int], CheckedTable], names: Iterable[str] = ()
) -> WordParts | None:
    """The order of execution of the parts; None without `memory.word_parts`. `names`: of the parameters of the first graph."""
    count = options.memory.word_parts
    if count is None:
        return None
    if ranks not in (1, count):
        raise SplitError(f"memory.word_parts={count}: each rank has one part of the words, and the pipeline has {ranks} ranks")
    stages = _number_of_stages(options, ranks)
    if stages <= count:
        raise SplitError(
            f"memory.word_parts={count}: the last {count} stages are the parts, and stages in all: {stages}. Ask for more, "
            f"such as split={2 * count}, with a schedule of two stages for each rank"
        )
    weight = next((whole_name(fqn) for fqn in names if rows_in(fqn) is not None), None)
    if ranks == 1:
        return WordParts(tuple(range(count)), tuple(range(count)), weight)
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


@dataclass(frozen=True)
class PartCalls:
    """The calls of the parts of an embedding, if it is cut, and of a head, in the order of execution."""

    embedding: tuple[ModuleCall, ...]
    head: tuple[ModuleCall, ...]

    @classmethod
    def among(cls, calls: Sequence[ModuleCall]) -> PartCalls:
        kinds = (re.compile(rf"(.*\.)?{kind}\[\d+\]") for kind in (LOOKUP, HEAD))
        return cls(*(tuple(call for call in calls if kind.fullmatch(call.module)) for kind in kinds))

    def check(self, stages: int) -> None:
        """Raise `SplitError` if the parts leave no stage for the other operations."""
        if stages <= len(self.embedding) + len(self.head):
            raise SplitError(
                f"memory.word_parts: {len(self.head)} stages are parts of the head, {len(self.embedding)} parts of its "
                f"embedding, and stages in all: {stages}. Ask for more, with split="
            )

    @property
    def fixed_starts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where the stages after the first one, and the last stages, start."""
        ends = [*(call.position for call in self.embedding[1:]), self.embedding[-1].end] if self.embedding else []
        return tuple(ends), tuple(call.position for call in self.head)

    def starts(self, stages: int, of_others: Callable[[int], tuple[int, ...]]) -> tuple[int, ...]:
        """The starts of all stages. `of_others`: the starts of so many stages over the whole forward, the first 0."""
        self.check(stages)
        first, last = self.fixed_starts
        return (0, *first, *of_others(stages - len(self.embedding) - len(self.head))[1:], *last)


def check_parts(program: PipelineProgram, rank_of_stage: Mapping[int, int], ranks: int) -> None:
    """Raise `SplitError` unless each rank has the part of the words with its number."""
    parts: dict[str, set[tuple[int, str]]] = {}
    for name in (name for stage in program.stages for name in stage.parameters if ranks > 1):
        rows = rows_in(name)
        if rows is not None:
            parts.setdefault(whole_name(name), set()).add((rows.start, name))
    numbers = {name: number for each in parts.values() for number, (_, name) in enumerate(sorted(each))}
    for stage in program.stages:
        for name in (name for name in stage.parameters if name in numbers):
            rank = rank_of_stage[stage.index]
            if rank != numbers[name]:
                raise SplitError(
                    f"memory.word_parts: stage {stage.index} on rank {rank} has {name}, which belongs on rank {numbers[name]}: "
                    f"give split= a number, or list each part of the head, `{HEAD}[0]`, .., as the start of a stage"
                )
