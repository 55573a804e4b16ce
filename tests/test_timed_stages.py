"""`graphpp.stage_costs`: seconds of every kind of action without a pipeline; equal stages once; refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp.errors import BatchError, GraphPPError, SplitError
from tests.compiler.test_time_programs import ASLEEP, mean, stack
from tests.compiler.test_time_programs import clock as clock

EXAMPLE = graphpp.Microbatch((torch.ones(4, 8),))


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_each_kind_of_action_has_its_time(backend: str) -> None:
    times = (ASLEEP, ASLEEP, 0.0, 3 * ASLEEP)
    found = graphpp.stage_costs(stack(times), mean, EXAMPLE, split=["1", "2", "3"], schedule="1F1B", backend=backend)
    assert len(found.stages) == 4
    for stage, seconds in zip(found.stages, times, strict=True):
        assert seconds <= stage.forward < seconds + ASLEEP
        assert 0 < stage.weight_grad < ASLEEP and 0 < (stage.backward or 0) < ASLEEP
    assert all(each > 0 for each in (*found.sends_forward, *found.sends_backward))
    assert all(stage.saved_bytes > 0 and stage.kept_bytes is not None for stage in found.stages[1:])


def test_a_schedule_decides_how_many_stages_there_are() -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))).to("meta")
    example = graphpp.Microbatch((torch.empty(4, 8, device="meta"),))
    parallel = graphpp.Parallel(device="cpu")
    found = graphpp.stage_costs(model, mean, example, schedule="ZBVZeroBubble", ranks=2, parallel=parallel)
    assert len(found.stages) == 4 and all(stage.forward > 0 for stage in found.stages)
    assert graphpp.simulate("ZBVZeroBubble", costs=found, microbatches=4).makespan > 0
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "why"),
    [
        ({"example": None}, BatchError, "needs example="),
        ({"split": ["nowhere"]}, SplitError, "nowhere"),
        ({"ranks": 0}, GraphPPError, "ranks"),
        ({"model": 3}, GraphPPError, "nn.Module"),
        ({"schedule": "no such"}, GraphPPError, "no such"),
        ({"parallel": "hpu"}, GraphPPError, "parallel.device: 'hpu' cannot be used on this machine"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        graphpp.stage_costs(**{"model": stack((0.0, 0.0)), "loss": mean, "example": EXAMPLE, **arguments})


def test_a_model_on_the_meta_device_needs_a_device() -> None:
    example = graphpp.Microbatch((torch.empty(4, 8, device="meta"),))
    with pytest.raises(GraphPPError, match='parallel="cuda" or "cpu"'):
        graphpp.stage_costs(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("meta"), mean, example, split=["1"])
