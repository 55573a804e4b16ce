"""The table of docs/meshes/what_to_write.md has the plans of `plan_table.py`, and ranks that exist make the same plans.

`GOLDEN_UPDATE=1` writes the lines of the tests that run into the document.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from graphpp.parallel import transport
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.planner.plan_table import HEAD, LINES, Line, compiled_plan, fullest, plan, row

DOCUMENT = Path(__file__).parents[2] / "docs" / "meshes" / "what_to_write.md"


def shown() -> list[str]:
    """The lines of the table in the document, without its head."""
    lines = DOCUMENT.read_text().splitlines()
    return lines[lines.index(HEAD) + 2 :][: len(LINES)]


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # 671B takes a minute where nothing else runs
@pytest.mark.parametrize(("at",), [(0,), *further(*range(1, len(LINES)))])
def test_the_document_has_the_plan(at: int) -> None:
    found, lines = row(LINES[at]), shown()
    if os.environ.get("GOLDEN_UPDATE"):
        DOCUMENT.write_text(DOCUMENT.read_text().replace(lines[at], found))
        lines = shown()
    assert lines[at] == found


def planned(rank: int, line: Line) -> str:
    """The plan of ranks whose messages go over gloo: those of one host hold no sent value."""
    torch.set_num_threads(1)
    with patch.object(transport, "same_host", lambda group: None):
        return str(compiled_plan(line))


@pytest.mark.exhaustive
@pytest.mark.parametrize("schedule", ["LoopedBFS"])
def test_one_process_makes_the_plan_of_all_ranks(schedule: str) -> None:
    line = Line("small", {"pp": 2, "dp_shard": 2}, 4, schedule, 4, 1, "full")
    alone = plan(line)
    assert fullest(alone).messages > 0
    assert run_ranks(planned, line.ranks, line) == [str(alone)] * line.ranks
