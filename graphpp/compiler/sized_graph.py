"""The programs of a graph with symbolic sizes, for the sizes of one microbatch.

Contract: `sized_program(program, ...)` has the programs of `program`, which are compiled once for all sizes. Its boundaries
and saved values have the sizes of the microbatch, and all bytes are counted for them. `PipelineProgram.sizes` has the numbers
that the programs are given. Nothing is captured, lowered or compiled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from graphpp._torch.symbols import Values
from graphpp.runtime.program import Boundary, PipelineProgram, StageProgram, TensorMeta


def sized_program(program: PipelineProgram, values: Values) -> PipelineProgram:
    """`program` for one set of sizes."""
    return replace(
        program,
        stages=tuple(_stage(stage, values) for stage in program.stages),
        boundaries=tuple(
            Boundary(each.stage, _metas(each.forward, values), _metas(each.backward, values)) for each in program.boundaries
        ),
        sizes={formula: values(number) for formula, number in program.sizes.items()},
        values=values,
    )


def _stage(stage: StageProgram, values: Values) -> StageProgram:
    return replace(
        stage,
        programs={phase: replace(item, values=values) for phase, item in stage.programs.items()},
        saved=_metas(stage.saved, values),
        saved_memory=_metas(stage.saved_memory, values),
        kept_memory=_metas(stage.kept_memory, values),
        unread_memory=_metas(stage.unread_memory, values),
    )


def _metas(metas: Iterable[TensorMeta], values: Values) -> tuple[TensorMeta, ...]:
    return tuple(meta.at(values) for meta in metas)
