"""An R ahead of a backward changes no bit, on any model, under any table; its backward recomputes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import graphpp
from graphpp import Costs, Schedule, schedules
from graphpp.runtime.program import Phase
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.recompute import with_recompute
from tests.backends.test_inductor import EXACT
from tests.distributed import run_ranks
from tests.end_to_end.test_every_schedule import LAYERS, options
from tests.end_to_end.test_every_schedule import MICROBATCHES as MANY
from tests.end_to_end.test_split_backward import MICROBATCHES, runs, split_of, stages_of
from tests.exhaustive import further
from tests.fuzz.harness import shuffled
from tests.pipeline.shards.test_training import PIPE, differing
from tests.pipeline.shards.test_training import options as sharded
from tests.sharding import train_on_mesh
from tests.special_models import SPECIAL
from tests.training import CASES, Counting, capturing, compiled, differences, eager, step, trained

SPLIT = [f"layers.{LAYERS // 2}"]


def everywhere(table: Schedule) -> Schedule:
    """The table with an R before every backward."""
    return with_recompute(table, frozenset(product(range(table.stages), range(table.microbatches))))


def placed(name: str, ranks: int, stages: int, microbatches: int) -> Schedule:
    """The named table with Rs in its waits, where F, I, W and R of a rank take equally long."""
    found = schedules.recompute_ahead(SCHEDULES[name](ranks, stages, microbatches), Costs.unit(stages, ranks, recompute=True))
    assert found.recomputed_ahead
    return found


@pytest.mark.first_cases(5)
@pytest.mark.parametrize("memory", [graphpp.Recompute(weight_grad=True), *further("selective", 0.4)], ids=str)
@pytest.mark.parametrize("name", sorted(SPECIAL, key=("norms", "tied").__contains__, reverse=True))
def test_an_r_changes_no_bit(name: str, memory: Any) -> None:
    split, table = split_of(name), everywhere(shuffled(stages_of(name), MICROBATCHES, 5))
    whole = trained(1, name, split=split, schedule="1F1B", microbatches=MICROBATCHES)
    assert differences(trained(1, name, split=split, schedule=table, memory=memory), whole) == []


@pytest.mark.parametrize(
    ("ranks", "schedule"),
    [(2, "1F1B"), (2, "ZBVZeroBubble"), (4, "1F1B"), *further((2, "Interleaved1F1B"), (2, "DualPipeV"), (4, "ZBVZeroBubble"))],
)
def test_ranks_that_recompute_while_they_wait_equal_the_plain_loop(ranks: int, schedule: str) -> None:
    given = options(schedule, ranks, "full")
    table = placed(schedule, ranks, len(given["split"]) + 1, MANY)
    assert differences(trained(ranks, "deep", split=given["split"], schedule=table, memory="full"), eager("deep", MANY)) == []


def looped(ranks: int, stages: int, microbatches: int) -> Schedule:
    return everywhere(SCHEDULES["LoopedBFS"](ranks, stages, microbatches))


@pytest.mark.parametrize("keep", [1, *further(0, None)])
def test_sharded_parameters_are_gathered_for_an_r(keep: int | None) -> None:
    given = sharded(4, "LoopedBFS", keep) | {"memory": "full"}
    for found, expected in zip(
        run_ranks(train_on_mesh, PIPE.ranks, PIPE, given | {"schedule": looped}),
        run_ranks(train_on_mesh, PIPE.ranks, PIPE, given),
        strict=True,
    ):
        assert differing(found, expected) == []


def test_regions_of_a_backend_are_compiled_for_an_r() -> None:
    given = {"split": SPLIT, "schedule": everywhere(schedules.plain_loop(1, 2, 2)), "memory": "full"}
    assert differences(trained(1, "deep", 2, **given, **EXACT), eager("deep", 2, 2)) == []


def test_an_r_runs_the_forward_again_and_its_backward_does_not() -> None:
    table = everywhere(schedules.plain_loop(1, 2, MANY))
    with capturing("deep"):
        case = CASES["deep"]()
        pipe = compiled(case, split=SPLIT, schedule=table, memory="full")
        step(pipe, case.batch)
    with Counting() as counting:
        step(pipe, case.batch)
    assert counting.calls["aten.silu"] == 2 * LAYERS * MANY
    programs = pipe.programs(0).programs
    assert "addmm" in programs[Phase.RECOMPUTE].source and "addmm" not in programs[Phase.BACKWARD].source
    assert pipe.programs(0).saved_bytes < sum(each.nbytes for each in pipe.programs(0).recomputed_memory)


def test_rs_and_marks_and_saved_values_stand_in_one_table() -> None:
    """Stage 1 recomputes microbatch 0 by an R and 1 in line, and saves the others; nothing else says that it recomputes."""
    plain = shuffled(4, MICROBATCHES, 2)
    table = replace(with_recompute(plain, frozenset({(1, 0)})), recomputed=frozenset({(1, 1)}))
    assert table.recomputed_ahead == {(1, 0)} and Schedule.parse(str(table)) == table
    split = split_of("llama")
    whole = trained(1, "llama", split=split, schedule="1F1B", microbatches=MICROBATCHES)
    assert differences(trained(1, "llama", split=split, schedule=table), whole) == []
    assert runs(table, None)["aten.rsqrt"] - runs(replace(plain, recomputed=frozenset()), None)["aten.rsqrt"] == 4


def test_an_r_beside_offload_is_refused_with_a_remedy() -> None:
    memory = graphpp.Memory(recompute="full", offload=graphpp.Offload(least_bytes=0))
    with capturing("deep"), pytest.raises(graphpp.ScheduleError, match="take the Rs out of the table"):
        case = CASES["deep"]()
        step(compiled(case, split=SPLIT, schedule=everywhere(schedules.plain_loop(1, 2, 2)), memory=memory), case.batch)


def test_verify_and_a_profile_know_an_r() -> None:
    case = CASES["deep"]()
    table = everywhere(schedules.plain_loop(1, 2, 2))
    with capturing("deep"):
        pipe = compiled(case, split=SPLIT, schedule=table, memory="full")
        profile = pipe.profile(*case.batch.args, target=case.batch.target, repeat=2, **case.batch.kwargs)
        again = [stage.ahead for stage in profile.costs.stages]
        for stage, ahead in zip(profile.costs.stages, again, strict=True):
            assert ahead is not None and ahead.forward > 0 and ahead.weight_grad > 0 and (ahead.backward or 0) > 0
            assert (stage.backward or 0) > 0 and stage.saved_bytes < ahead.saved_bytes
        assert "R" in str(profile).splitlines()[1].split()
        assert profile.timeline.peak_bytes(0) == schedules.peak_bytes(profile.timeline.schedule, profile.costs)[0]
        example = graphpp.Microbatch(case.batch.args, case.batch.kwargs, case.batch.target)
        assert graphpp.verify(case.model, case.loss, example, split=SPLIT, schedule=table, memory="full").ok
