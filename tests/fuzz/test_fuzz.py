"""Random programs, random cuts, random schedules: cut equals uncut, bit for bit.

100 programs by default, the same on every run. `GRAPHPP_FUZZ=2000` runs more, `GRAPHPP_FUZZ_SEED=7` others. A failure is
shrunk and printed as Python: paste the program and the cuts into `check(Program(...), [Cut(...)])`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from graphpp.errors import CaptureError
from graphpp.passes.joint import JointGraph
from tests.fuzz.harness import Cut, captured, compare, cuts, differences, run_eager, run_uncut, uncut_by_count
from tests.fuzz.operations import DRAWS, WRITES
from tests.fuzz.programs import Net, Program, programs

EXAMPLES = int(os.environ.get("GRAPHPP_FUZZ", "100"))
SEED = int(os.environ.get("GRAPHPP_FUZZ_SEED", "0"))
QUIET = (HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much)


def check(program: Program, several: Sequence[Cut]) -> None:
    """Cut and run a program in several ways. A cut through a buffer that is written may be refused, nothing else."""
    note(program.listing())
    joint = captured_or_none(program)
    if joint is None:
        return
    uncut = uncut_by_count(program, joint, [cut.microbatches for cut in several])
    for cut in several:
        try:
            found = compare(program, joint, cut, uncut[cut.microbatches])
        except CaptureError as error:
            assert "is written in stage" in str(error) and _writes(program), error
            continue
        assert not found, f"{cut} at positions {cut.starts(joint)}:\n" + "\n".join(found)


def captured_or_none(program: Program) -> JointGraph | None:
    """The joint graph; None for a program whose loss reaches no parameter."""
    try:
        return captured(Net(program))
    except CaptureError as error:
        assert "does not depend on any parameter" in str(error), error
        return None


def _draws(program: Program) -> bool:
    return any(op.name in DRAWS for op in program.ops)


def _writes(program: Program) -> bool:
    return any(op.name in WRITES for op in program.ops)


@pytest.mark.slow
@pytest.mark.timeout(0)
@seed(SEED)
@settings(max_examples=EXAMPLES, suppress_health_check=QUIET, database=None)
@given(programs(), st.lists(cuts(), min_size=1, max_size=3))
def test_cut_programs_equal_the_uncut_graph(program: Program, several: list[Cut]) -> None:
    check(program, several)


@pytest.mark.slow
@pytest.mark.timeout(0)
@seed(SEED)
@settings(max_examples=max(EXAMPLES // 4, 1), suppress_health_check=QUIET, database=None, phases=set(Phase))
@given(programs())
def test_uncut_graphs_are_close_to_eager(program: Program) -> None:
    note(program.listing())
    joint = None if _draws(program) else captured_or_none(program)
    if joint is None:
        return
    found = differences(run_uncut(Net(program), joint, 2), run_eager(Net(program), 2), {"*": 1e-5})
    assert not found, "\n".join(found)
