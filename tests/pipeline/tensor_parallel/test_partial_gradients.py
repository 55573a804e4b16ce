"""Under sequence parallelism a rank has a part of each norm's gradient, and the parts are added up once a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from graphpp.runtime.program import Phase
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh
from tests.tensor_parallel import batch, compiled, decoder, spread

TENSOR, SHARDS, PIPE = Mesh((2,), ("tp",)), Mesh((2, 2), ("dp_shard", "tp")), Mesh((2, 2), ("pp", "tp"))
LAYERS = 2
NORMS = 2 * (2 * LAYERS + 1)  # weights and biases


def sums_in_backwards(rank: int, mesh: Mesh, options: Mapping[str, Any]) -> int:
    """How many all-reduces stand in the backwards of the first stage."""
    torch.set_num_threads(1)
    made = mesh.made()
    pipe = compiled(made, spread(decoder(layers=LAYERS), made["tp"], sequence=True), **options)
    tokens, target = batch(1)
    pipe.step(tokens, target=target)
    return pipe.programs(0).programs[Phase.BACKWARD].source.count("all_reduce_default(")


def test_no_backward_sums_the_gradients_of_norms() -> None:
    assert run_ranks(sums_in_backwards, 2, TENSOR, {}) == [0, 0]


@pytest.mark.exhaustive
def test_gradients_that_leave_at_once_are_summed_in_backwards() -> None:
    options = {"parallel": graphpp.Parallel(keep=0)}
    assert run_ranks(sums_in_backwards, 4, SHARDS, options) == [NORMS] * 4


def accumulated(rank: int, mesh: Mesh, options: Mapping[str, Any], steps: int) -> dict[str, torch.Tensor]:
    """Whole gradients of some steps without `zero_grad` between."""
    torch.set_num_threads(1)
    made = mesh.made()
    pipe = compiled(made, spread(decoder(layers=LAYERS), made["tp"], sequence=True), **options)
    for number in range(steps):
        tokens, target = batch(100 * number + mesh.replica(rank))
        pipe.step(tokens, target=target)
    return {fqn: whole_tensor(each.grad) for fqn, each in pipe.named_parameters()}


def accumulated_alone(replicas: int, steps: int) -> dict[str, torch.Tensor]:
    pipe = compiled(None, decoder(layers=LAYERS))
    for number in range(steps):
        for replica in range(replicas):
            tokens, target = batch(100 * number + replica)
            pipe.step(tokens, target=target, accumulation_steps=replicas)
    return {fqn: each.grad for fqn, each in pipe.named_parameters()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (SHARDS, {"split": ["layers.1"], "schedule": "LoopedBFS", "parallel": graphpp.Parallel(keep=1)}),
        *further((PIPE, {"split": ["layers.1"], "schedule": "ZB1P"})),
    ],
)
def test_gradients_of_earlier_steps_are_not_summed_again(mesh: Mesh, options: Mapping[str, Any]) -> None:
    expected = accumulated_alone(mesh.replicas, 2)
    for found in run_ranks(accumulated, 4, mesh, options, 2):
        for fqn, gradient in found.items():
            torch.testing.assert_close(gradient, expected[fqn], rtol=1e-5, atol=1e-6)


def seen_by_a_hook(rank: int) -> torch.Tensor:
    """The gradient of a norm's weight when the hook on complete gradients is called."""
    torch.set_num_threads(1)
    made, seen = TENSOR.made(), dict[str, torch.Tensor]()
    model = spread(decoder(layers=LAYERS), made["tp"], sequence=True)
    weight = model.layers[0].norm.weight
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.update(weight=whole_tensor(parameter.grad).clone()))
    tokens, target = batch(0)
    compiled(made, model).step(tokens, target=target)
    return seen["weight"]


@pytest.mark.exhaustive
def test_a_hook_sees_the_gradient_of_all_ranks() -> None:
    expected = accumulated_alone(1, 1)["layers.0.norm.weight"]
    for found in run_ranks(seen_by_a_hook, 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
