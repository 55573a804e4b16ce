"""Random programs, random cuts, random schedules: cut equals uncut, bit for bit.

40 programs by default, the same on every run. `GRAPHPP_FUZZ=2000` runs more, `GRAPHPP_FUZZ_SEED=7` others. A failure
is shrunk (that takes up to five minutes; `GRAPHPP_FUZZ_SHRINK=0` leaves it out) and printed as Python: paste the
program and the cuts into `check(Program(...), [Cut(...)])`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

import graphpp
from graphpp.errors import CaptureError, SplitError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.planner.layers import module_calls
from tests.distributed import run_ranks
from tests.exhaustive import PROGRAMS
from tests.expert_parallel import train_alone, train_on_mesh
from tests.fuzz.harness import (
    Cut,
    Numbers,
    captured,
    compare,
    cuts,
    differences,
    lowered,
    on_two_ranks,
    run_eager,
    run_ranks_part,
    run_uncut,
    tied,
    uncut_by_count,
)
from tests.fuzz.meshes import OnMesh, Ran, on_meshes, run_alone, run_on_mesh, starts, with_experts
from tests.fuzz.operations import DRAWS, MISPREDICTED, WRITES
from tests.fuzz.programs import Net, Program, programs
from tests.pipeline.expert_parallel.test_training import assert_near
from tests.sharding import Mesh

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


# ------------------------------------------------------------------------------------------------ the public interface


@fuzz(0.1)
@given(programs(), st.lists(st.integers(0, 20), min_size=1, max_size=3), st.integers(1, 3))
def test_compiled_programs_equal_eager(program: Program, chosen: list[int], microbatches: int) -> None:
    """`graphpp.compile` with cuts at modules: steps, then an evaluation."""
    note(program.listing())
    net, eager = Net(program), Net(program)
    split = _modules(captured(Net(program)), chosen)
    if _has(program, DRAWS) or not split:
        return
    note(f"split={split}")
    try:
        pipe = graphpp.compile(net, net.loss(), split=split, microbatches=microbatches)
        losses = [loss for _ in range(2) for loss in pipe.step_microbatches(net.batch(microbatches)).losses]
    except CaptureError as error:
        assert "is written in stage" in str(error) and _has(program, WRITES), error
        return
    theirs = run_eager(eager, microbatches)
    grads = {name: value.grad for name, value in net.named_parameters() if value.grad is not None}
    found = differences(Numbers(losses, grads, dict(net.named_buffers())), theirs, {"*": 1e-5})
    assert not found, "\n".join(found)
    if microbatches == 1:
        _check_evaluation(pipe, net, eager)


def _modules(joint: JointGraph, chosen: Sequence[int]) -> list[str]:
    """Some calls of operations, in order, none of them the first."""
    calls = [call for call in module_calls(joint) if re.fullmatch(r"ops\.\d+(@\d+)?", call.fqn) and call.position > 0]
    starts = {call.position: call.fqn for call in calls}
    return [starts[at] for at in sorted({sorted(starts)[index % len(starts)] for index in chosen})] if starts else []


def _check_evaluation(pipe: graphpp.Pipeline, net: Net, eager: Net) -> None:
    """In eval mode as in eager: outputs and what the forward writes; the model stays in train mode."""
    (batch,) = net.batch(1)
    try:
        ours = pipe.eval(*batch.args, target=batch.target, **batch.kwargs).output
    except SplitError:  # a stage starts at a module that does nothing in eval mode
        return
    with torch.no_grad():
        theirs = eager.eval()(*batch.args, **batch.kwargs)
    assert net.training and ours.keys() == theirs.keys()
    for name in ("last", "integers", "number"):
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5)
    for (name, mine), other in zip(net.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


# ------------------------------------------------------------------------------------------------------- on two ranks


@fuzz(0.03)
@given(st.lists(st.tuples(programs(), on_two_ranks()), min_size=1, max_size=4))
def test_two_ranks_equal_the_uncut_graph(cases: list[tuple[Program, Cut]]) -> None:
    for program, cut in cases:
        note(f"{program.listing()}\n{cut}")
    for (program, cut), *parts in zip(cases, *run_ranks(run_ranks_part, 2, cases), strict=True):
        if any(part is None for part in parts):
            assert _has(program, WRITES)
            continue
        joint = captured(Net(program))
        loose = dict.fromkeys(tied(lowered(joint, cut)), 1e-6)
        if _has(program, MISPREDICTED):
            loose = {"*": 1e-4}
        found = differences(_joined(parts), run_uncut(Net(program), joint, cut.microbatches), loose)
        assert not found, f"{cut} at positions {cut.starts(joint)}:\n" + "\n".join(found)


def _joined(parts: Sequence[Numbers]) -> Numbers:
    """The ranks' numbers as one; what several hold is equal, bit for bit."""
    whole = Numbers(parts[0].losses)
    for part in parts:
        assert not differences(Numbers(part.losses), Numbers(whole.losses))
        for mine, all_of_them in ((part.grads, whole.grads), (part.buffers, whole.buffers)):
            assert all(torch.equal(all_of_them.setdefault(name, value), value) for name, value in mine.items())
    return whole


# ---------------------------------------------------------------------------------------------------------- on meshes


@fuzz(0.05)
@given(st.lists(on_meshes(), min_size=1, max_size=3))
def test_meshes_equal_one_process(drawn: list[tuple[Program, OnMesh]]) -> None:
    chosen = [(program, case, starts(program, case)) for program, case in drawn]
    for ranks in sorted({case.mesh.ranks for _, case, _ in chosen}):
        cases = [(program, case, split) for program, case, split in chosen if split is not None and case.mesh.ranks == ranks]
        for program, case, split in cases:
            note(f"{program.listing()}\n{case}\nsplit={split}")
        for one, *parts in zip(cases, *run_ranks(run_on_mesh, ranks, cases), strict=True):
            check_on_mesh(*one, parts)


def check_on_mesh(program: Program, case: OnMesh, split: list[str], parts: Sequence[Ran]) -> None:
    """Compare the ranks with one process.

    A cut through a buffer that is written may be refused, and with `keep=0` a view of a parameter that a stage hands on.
    """
    alone = run_alone(program, case, split)
    if case.keep == 0 and all("would keep a whole parameter" in part.refused for part in parts):
        return
    if alone[0].refused or parts[0].refused:
        assert all("is written in stage" in ran.refused for ran in (*alone, *parts)), (alone, parts)
        assert _has(program, WRITES)
        return
    for rank, part in enumerate(parts):
        for ours, theirs in zip(part.steps, alone[case.mesh.replica(rank)].steps, strict=True):
            wanted = Numbers(theirs.losses, {}, {name: theirs.buffers[name] for name in ours.buffers})
            wanted.grads = {name: theirs.grads[name] for name in ours.grads}
            loose = dict.fromkeys(ours.grads, 1e-5) if case.reorders else dict.fromkeys(part.tied, 1e-6)
            if _has(program, MISPREDICTED):
                loose = {"*": 1e-4}
            found = differences(ours, wanted, loose)
            assert not found, f"rank {rank}, {case}, split={split}:\n" + "\n".join(found)
    held = {name for part in parts for name in part.steps[0].grads}
    assert held == set(alone[0].steps[0].grads)


@fuzz(0.05)
@given(with_experts())
def test_experts_equal_one_process(drawn: tuple[Mesh, dict[str, Any]]) -> None:
    mesh, options = drawn
    note(f"{mesh}, {options}")
    expected = train_alone(mesh.replicas)
    for found in run_ranks(train_on_mesh, mesh.ranks, mesh, options):
        assert_near(found, expected)
