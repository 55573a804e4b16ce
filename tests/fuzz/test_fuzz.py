"""Random programs, random cuts, random schedules: cut equals uncut, bit for bit.

16 programs by default, the same on every run. `GRAPHPP_FUZZ=2000` runs more, `GRAPHPP_FUZZ_SEED=7` others. A failure
is shrunk (that takes up to five minutes; `GRAPHPP_FUZZ_SHRINK=0` leaves it out) and printed as Python: paste the
program and the cuts into `check(Program(...), [Cut(...)])`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from graphpp.errors import CaptureError
from tests.exhaustive import PROGRAMS
from tests.fuzz.harness import Cut, captured, compare, cuts, differences, run_eager, run_uncut, uncut_by_count
from tests.fuzz.operations import DRAWS, WRITES
from tests.fuzz.programs import Net, Program, programs

SEED = int(os.environ.get("GRAPHPP_FUZZ_SEED", "0"))
PHASES = set(Phase) if os.environ.get("GRAPHPP_FUZZ_SHRINK", "1") != "0" else {Phase.generate}


def fuzz(share: float) -> Callable[[Any], Any]:
    """Settings of a test that runs a share of the programs asked for."""
    quiet = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)
    count = max(1, round(PROGRAMS * share))
    chosen = settings(max_examples=count, suppress_health_check=quiet, database=None, phases=PHASES - {Phase.explain})
    return lambda test: pytest.mark.slow(pytest.mark.timeout(0)(seed(SEED)(chosen(test))))


def check(program: Program, several: Sequence[Cut]) -> None:
    """Cut and run a program in several ways. A cut through a buffer that is written may be refused, nothing else."""
    note(program.listing())
    joint = captured(Net(program))
    uncut = uncut_by_count(program, joint, [cut.microbatches for cut in several])
    for cut in several:
        try:
            found = compare(program, joint, cut, uncut[cut.microbatches])
        except CaptureError as error:
            assert "is written in stage" in str(error) and _has(program, WRITES), error
            continue
        assert not found, f"{cut} at positions {cut.starts(joint)}:\n" + "\n".join(found)


def _has(program: Program, names: Sequence[str]) -> bool:
    return any(op.name in names for op in program.ops)


@fuzz(1)
@given(programs(), st.lists(cuts(), min_size=1, max_size=3))
def test_cut_programs_equal_the_uncut_graph(program: Program, several: list[Cut]) -> None:
    check(program, several)


@fuzz(0.2)
@given(programs())
def test_uncut_graphs_are_close_to_eager(program: Program) -> None:
    note(program.listing())
    if not _has(program, DRAWS):
        found = differences(run_uncut(Net(program), captured(Net(program)), 2), run_eager(Net(program), 2), {"*": 1e-5})
        assert not found, "\n".join(found)
