"""`graphpp.schedules` as users see it: every name exists, and a generator with parameters is accepted as `schedule=`."""

from functools import partial

import pytest
import torch
from torch import Tensor

import graphpp
from tests.distributed import run_ranks
from tests.special_models import CUTS, SPECIAL
from tests.training import compiled, differences, eager, local_grads, same, step, trained


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


def test_a_function_that_moves_stages_to_other_ranks_is_refused() -> None:
    """The parameters stay where the first table put them, so no rank would update the parameters of the second."""
    with pytest.raises(graphpp.ScheduleError, match=r"for 4 microbatches the schedule .* puts stage 0 on rank 1"):
        run_ranks(moved, 2)


def moved(rank: int) -> None:
    def schedule(ranks: int, stages: int, microbatches: int) -> list[list[str]]:
        rows = [[f"{stage}{kind}{m}" for kind in "FB" for m in range(microbatches)] for stage in range(stages)]
        return rows if microbatches == 2 else rows[::-1]

    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule=schedule)
    for count in (2, 4):
        pipe.step_microbatches([graphpp.Microbatch(case.batch.args, {}, case.batch.target)] * count)


def test_a_rank_may_be_left_without_a_stage() -> None:
    numbers = eager("plain", 2, steps=1)
    for losses, grads in run_ranks(idle, 3):
        assert torch.equal(losses, numbers.losses[0])
        assert all(same(grad, numbers.grads[0][fqn]) for fqn, grad in grads.items())


def idle(rank: int) -> tuple[Tensor, dict[str, Tensor | None]]:
    rows = ["0F0 0F1 0I0 0W0 0B1", "", "1F0 1B0 1F1 1B1"]
    case = SPECIAL["plain"]()
    pipe = compiled(case, split=CUTS[2], schedule=graphpp.Schedule.of(rows))
    losses, grads = step(pipe, case.batch).losses, local_grads(pipe)
    assert bool(grads) == (rank != 1)
    evaluated = pipe.eval(*case.batch.args, target=case.batch.target)
    assert evaluated.losses is not None and torch.equal(evaluated.losses, losses)
    return losses, grads
