"""The peaks of a table that is read once are those of `step_peaks`."""

from __future__ import annotations

from random import Random

import pytest

from graphpp.errors import ScheduleError
from graphpp.schedules.check.step_memory import step_peaks
from graphpp.schedules.check.step_moments import StepMoments
from graphpp.schedules.generate.names import SCHEDULES
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.place_shards import place_shards
from graphpp.schedules.table.actions import Kind
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import LayerBytes, StateBytes, held_bytes
from tests.schedules.simulate.test_step_times import TABLES, running


def bytes_of(stages: int, seed: int) -> tuple[Costs, tuple[StateBytes, ...]]:
    """Random bytes of stages, and state of which a part is tied and a part has no gradients."""
    random = Random(seed)

    def some() -> int:
        return random.randrange(1000)

    each = tuple(
        StageCosts(saved_bytes=some(), kept_bytes=random.choice([None, some()]), peak_bytes={kind: some() for kind in "FBIW"})  # type: ignore[misc]
        for _ in range(stages)
    )
    own = [
        StateBytes((stage,), (stage,) if stage % 3 else (), some(), some(), optimizer=some(), sent=some())
        for stage in range(stages)
    ]
    return Costs(each), (*own, StateBytes((0, stages - 1), (0, stages - 1), some(), some(), buffers=some()))


@pytest.mark.parametrize("shards", [None, 4])
@pytest.mark.parametrize(("name", "per_rank", "keep"), TABLES)
def test_the_peaks_are_those_of_the_walk(name: str, per_rank: int, keep: int | None, shards: int | None) -> None:
    table = running(name, per_rank, keep)
    moments = StepMoments(table)
    for seed in range(3):
        costs, state = bytes_of(table.stages, seed)
        held = held_bytes(state, table.rank_of_stage, table.ranks, shards, keep is not None)
        expected = step_peaks(table, costs, held)
        assert [(each.nbytes, dict(each.most)) for each in moments.peaks(costs, held)] == [
            (each.nbytes, dict(each.most)) for each in expected
        ]


@pytest.mark.parametrize(("name", "per_rank"), [("1F1B", 1), ("LoopedBFS", 2), ("DualPipeV", 2), ("InterleavedZeroBubble", 2)])
def test_the_peaks_with_single_layers_are_those_of_the_walk(name: str, per_rank: int) -> None:
    table = add_send_recv(SCHEDULES[name](4, 4 * per_rank, 8))
    moments, random = StepMoments(table), Random(0)
    for seed in range(3):
        costs, state = bytes_of(table.stages, seed)
        layers = {
            (stage, kind): LayerBytes(*(random.randrange(9_000) * (kind is not Kind.F or at == 0) for at in range(3)))
            for stage in range(table.stages - 1)
            for kind in (Kind.F, Kind.B, Kind.I, Kind.W)
        }
        held = held_bytes(state, table.rank_of_stage, table.ranks, 4, True, layers)
        expected = [(each.nbytes, dict(each.most)) for each in step_peaks(table, costs, held)]
        assert [(each.nbytes, dict(each.most)) for each in moments.peaks(costs, held)] == expected


def test_a_forward_without_a_backward_keeps_nothing() -> None:
    table = Schedule.of(["0F0 0F1 0F2"])
    costs = Costs((StageCosts(saved_bytes=5),))
    held = held_bytes((), table.rank_of_stage, 1)
    assert StepMoments(table).peaks(costs, held)[0].nbytes == step_peaks(table, costs, held)[0].nbytes == 5


def test_other_costs_and_state_are_refused() -> None:
    table = place_shards(add_send_recv(SCHEDULES["1F1B"](2, 2, 4)), None)
    moments, (costs, state) = StepMoments(table), bytes_of(2, 0)
    held = held_bytes(state, table.rank_of_stage, 2, 2)
    with pytest.raises(ScheduleError, match=r"'1F1B' has 2 stages on 2 ranks: .* got 2 and 1"):
        moments.peaks(costs, held[:1])
    with pytest.raises(ScheduleError, match="are for step_peaks"):
        moments.peaks(costs, held_bytes(state, table.rank_of_stage, 2, 2, in_order=True))
