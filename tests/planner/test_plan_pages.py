"""`Plan.to_html`: the page of one plan."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import nn

import graphpp


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'id="data">(.*?)</script>', text)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_a_plan_has_its_stages_and_its_memory() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    example = graphpp.Microbatch(torch.ones(2, 8), target=torch.ones(2, 8))
    pipe = graphpp.compile(model, nn.functional.mse_loss, split=["2"], schedule="1F1B", microbatches=4, example=example)
    data = data_of(pipe.plan.to_html())
    assert [each["parameters"] for each in data["stages"]] == [each.parameter_bytes for each in pipe.plan.stages]
    assert [each["forward"] for each in data["boundaries"]] == [pipe.plan.stages[0].sent_forward_bytes]
    assert data["timelines"][0]["unit"] == "units"
    assert data["memory"]["kinds"][0] == "weights"
