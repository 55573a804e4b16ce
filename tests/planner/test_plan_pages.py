"""`to_html` of plans: a page of one plan, and a page of all candidates of a search."""

from __future__ import annotations

import json
import re
from typing import Any

import torch
from torch import nn

import graphpp

MIB = 2**20


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


def test_a_search_has_every_candidate_with_its_reason() -> None:
    costs = graphpp.Costs(tuple(graphpp.StageCosts(1, 1, 1, saved_bytes=MIB) for _ in range(4)))
    state = [graphpp.StateBytes((stage,), (stage,), MIB, MIB) for stage in range(4)]
    search = graphpp.plan_auto(costs, state, 8 * MIB, ranks=4, microbatches=8)
    text = search.to_html()
    plans = data_of(text)["plans"]
    assert [each["name"] for each in plans] == [each.name for each in search.candidates]
    assert [each["fits"] for each in plans] == [each.peak <= 8 * MIB for each in search.candidates]
    assert plans[0]["fits"] and not plans[-1]["fits"]
    assert search.candidates[-1].reason in text
