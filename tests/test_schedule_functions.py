"""`graphpp.schedules` as users see it: every name is there, and a generator with parameters is a `schedule=`."""

from functools import partial

import pytest

import graphpp
from tests.special_models import CUTS, SPECIAL
from tests.training import compiled, differences, eager, step, trained


def test_every_name_is_there_and_documented() -> None:
    assert sorted(graphpp.schedules.__all__) == graphpp.schedules.__all__
    for name in graphpp.schedules.__all__:
        thing = getattr(graphpp.schedules, name)
        assert not callable(thing) or thing.__doc__


def test_every_named_schedule_has_its_function() -> None:
    public = {getattr(graphpp.schedules, name) for name in graphpp.schedules.__all__ if name.islower()}
    assert set(graphpp.schedules.SCHEDULES.values()) <= public


def test_a_group_of_megatrons_by_partial_trains_like_eager() -> None:
    schedule = partial(graphpp.schedules.megatron_interleaved, group=3)
    assert differences(trained(1, "plain", split=CUTS[4], schedule=schedule, microbatches=8), eager("plain", 8)) == []


@pytest.mark.parametrize(("name", "stages"), [("ZB1P", 4), ("ZB2P", 4), ("InterleavedZeroBubble", 4), ("V-Min", 2)])
def test_split_backwards_train_like_eager(name: str, stages: int) -> None:
    assert differences(trained(1, "plain", split=CUTS[stages], schedule=name, microbatches=4), eager("plain", 4)) == []


def test_held_back_weight_gradients_train_like_eager() -> None:
    def schedule(*counts: int) -> graphpp.Schedule:
        return graphpp.schedules.defer_weight_grads(graphpp.schedules.one_f_one_b(*counts), [0, 3])

    assert differences(trained(1, "plain", split=CUTS[4], schedule=schedule, microbatches=4), eager("plain", 4)) == []


def test_a_schedule_function_says_how_many_stages_it_wants() -> None:
    """`split` left open: two stages for the one rank, as for the same schedule by its name."""
    case = SPECIAL["plain"]()
    for schedule in ("MegatronInterleaved", partial(graphpp.schedules.megatron_interleaved, group=2)):
        pipe = compiled(case, schedule=schedule, microbatches=4)
        step(pipe, case.batch)
        assert "2 stages on 1 rank" in repr(pipe)
