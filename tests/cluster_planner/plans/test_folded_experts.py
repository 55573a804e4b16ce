"""Plans whose experts are spread over the ranks of `tp` and `cp` too."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp import TrainingPlan, TrainingPlans
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.errors import GraphPPError, ScheduleError
from tests.distributed import run_ranks

MEGATRON = "--micro-batch-size 1 --bf16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
TITAN = """
    [parallelism]
    pipeline_parallel_degree = 2
    tensor_parallel_degree = 2
    expert_parallel_degree = 4
"""


def loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())


@cache
def costs() -> ModelCosts:
    config = transformers.MixtralConfig(
        vocab_size=256, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        model, tokens = transformers.MixtralForCausalLM(config), torch.zeros(1, 512, dtype=torch.int64)
    return capture_costs(model, loss, graphpp.Microbatch((), {"input_ids": tokens}, tokens))


def priced(like: Any, **options: Any) -> TrainingPlans:
    return graphpp.plan(costs(), machines="8xH100", batch=16, like=like, search=False, **options)


def yours(like: Any) -> TrainingPlan:
    found = priced(like).yours
    assert found is not None
    return found


@pytest.mark.parametrize("like", [f"{MEGATRON} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1", TITAN])
def test_layouts_with_whole_experts_are_priced_on_two_meshes(like: str) -> None:
    plan = yours(like)
    shape = plan.setting.shape
    assert (shape.tp, shape.ep, shape.folded, shape.expert_ranks) == (2, 2, True, 4)
    assert str(shape).endswith("tp 2, experts over tp too")
    assert plan.mesh["tp"] == 2 and "ep" not in plan.mesh and plan.expert_mesh is not None
    assert plan.expert_mesh["ep"] == 4 and plan.expert_mesh["pp"] == 2
    assert yours(str(plan.setting)).seconds == plan.seconds
    assert TrainingPlan.from_json(plan.to_json()) == plan


def test_whole_experts_save_the_sums_over_tp() -> None:
    whole = yours(f"{MEGATRON} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1")
    divided = yours(f"{MEGATRON} --expert-model-parallel-size 2")
    assert not divided.setting.shape.folded and divided.expert_mesh is None
    assert whole.sent["tp"] < divided.sent["tp"]


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (f"{MEGATRON} --expert-model-parallel-size 4 --expert-tensor-parallel-size 4", "priced are 1 and that of attention, 2"),
        (f"{MEGATRON} --expert-model-parallel-size 4", "where tp divides each, 2 here"),
        (f"{MEGATRON} --expert-model-parallel-size 3 --expert-tensor-parallel-size 1", "tp x cp = 2 ranks"),
        ("pp 2, cp 1, tp 1, experts over tp too", "where one of these has several ranks"),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(like: str, message: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        yours(like)
    assert message in str(caught.value)


def without_the_mesh(rank: int) -> str:
    plan = yours(f"{MEGATRON} --expert-model-parallel-size 4 --expert-tensor-parallel-size 1")
    mesh = init_device_mesh("cpu", tuple(plan.mesh.values()), mesh_dim_names=tuple(plan.mesh))
    with pytest.raises(GraphPPError) as caught:
        graphpp.compile(torch.nn.Linear(2, 2), torch.nn.functional.mse_loss, plan=plan, mesh=mesh)
    return str(caught.value)


@pytest.mark.exhaustive
def test_a_plan_asks_for_the_mesh_of_its_experts() -> None:
    assert all("parallel=graphpp.Parallel(expert_mesh=" in found for found in run_ranks(without_the_mesh, 8))
