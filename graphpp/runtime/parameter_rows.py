"""Rows of a parameter that are a parameter of their own for graphs and programs (`memory.word_parts`).

- The name of such rows is `lm_head.weight[0:32000]`: the parameter's FQN and the rows. Graphs, programs and gradients know
  these names, and the model has the whole parameter under its FQN.
- On several ranks the model's parameter is a `DTensor` with the placement `Shard(0)` over the ranks of the pipeline, whose
  local tensor has this rank's rows; the runner of a rank calls its rows by the parameter's FQN. In one process the parameter
  is whole, and its rows are views.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch

from graphpp.runtime.program import PipelineProgram

_NAME = re.compile(r"(?P<fqn>.+)\[(?P<first>\d+):(?P<end>\d+)\]")


def rows_of(rows: int, ranks: int, rank: int) -> range:
    """The rows of a rank: `ceil(rows / ranks)`, the last ranks fewer or none, as torch's `Shard` cuts."""
    each = -(-rows // ranks)
    first = min(rank * each, rows)
    return range(first, min(first + each, rows))


def rows_name(fqn: str, rows: range) -> str:
    return f"{fqn}[{rows.start}:{rows.stop}]"


def whole_name(name: str) -> str:
    """The FQN of the parameter that has these rows; the FQN of a whole parameter itself."""
    found = _NAME.fullmatch(name)
    return found["fqn"] if found else name


def rows_in(name: str) -> range | None:
    """The rows that a name means; None for a whole parameter."""
    found = _NAME.fullmatch(name)
    return range(int(found["first"]), int(found["end"])) if found else None


def any_rows(names: Iterable[str]) -> bool:
    return any(map(_NAME.fullmatch, names))


def joined_rows(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by FQN, with all rows of a parameter joined."""
    found: dict[str, list[str]] = {}
    for name in sorted(tensors, key=lambda name: (rows_in(name) or range(0)).start):
        found.setdefault(whole_name(name), []).append(name)
    several = {fqn: [tensors[name] for name in names] for fqn, names in found.items()}
    return {fqn: each[0] if len(each) == 1 else torch.cat(each) for fqn, each in several.items()}


def ranks_of_parameters(program: PipelineProgram, rank_of_stage: Mapping[int, int]) -> dict[str, list[int]]:
    """The ranks, ascending, that have each parameter or its rows; the first one counts the norm of a whole parameter."""
    found: dict[str, set[int]] = {}
    for index, fqn in ((stage.index, fqn) for stage in program.stages for fqn in stage.parameters):
        found.setdefault(fqn, set()).add(rank_of_stage[index])
    return {fqn: sorted(ranks) for fqn, ranks in found.items()}
