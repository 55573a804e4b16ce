"""Data parallelism: gradients are the mean over the replicas, under every kind of backward."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn import functional as F

import graphpp
from graphpp.options.split import ModuleCall
from graphpp.runtime.task import Task
from tests import internals
from tests.distributed import rank_outcomes, run_ranks
from tests.exhaustive import further
from tests.moe import MoE
from tests.moe import batch as expert_batch
from tests.parallel.test_agreement import SOON, STEP, gave_up, is_late
from tests.special_models import CUTS, SPECIAL
from tests.training import compiled, joined, local_grads, same, step

# Split backwards, whole ones, and all-reduces that start before the other stages are done.
SPLIT = [
    "0F0 0F1 0I0 0W0 0B1 0REDUCE_GRAD",
    "1F0 1I0 1F1 1B1 1W0 1REDUCE_GRAD",
]


def replicated(rank: int, name: str, schedule: Any) -> dict[str, Tensor | None]:
    """Pipelines of two ranks, (0, 1) and (2, 3), each on data of its own; this rank's gradients after two steps."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "pp"))
    cut = CUTS[4 if schedule == "ZBVZeroBubble" else 2]
    pipe = compiled(SPECIAL[name](), split=cut, schedule=schedule, microbatches=2, mesh=mesh)
    for seed in range(2):  # the second step adds to the first one's mean
        step(pipe, SPECIAL[name](rank // 2 + 2 * seed).batch)
    return local_grads(pipe)


def alone(rank: int, name: str, schedule: Any) -> list[dict[str, Tensor | None]]:
    """One pipeline of two ranks: the gradients of each of the four batches."""
    pipe = compiled(SPECIAL[name](), split=CUTS[4 if schedule == "ZBVZeroBubble" else 2], schedule=schedule, microbatches=2)
    found = []
    for seed in range(4):
        for parameter in pipe.parameters() if seed else ():
            parameter.grad = None
        step(pipe, SPECIAL[name](seed).batch)
        found.append(local_grads(pipe))
    return found


@pytest.mark.parametrize(
    ("name", "schedule"), [("tied", SPLIT), *further(("plain", "1F1B"), ("plain", SPLIT), ("tied", "ZBVZeroBubble"))]
)
def test_gradients_are_the_mean_over_the_replicas(name: str, schedule: Any) -> None:
    found = run_ranks(replicated, 4, name, schedule)
    assert all(same(found[0][fqn], found[2][fqn]) for fqn in found[0])
    both = joined(found[:2])
    by_seed = [joined(parts) for parts in zip(*run_ranks(alone, 2, name, schedule), strict=True)]
    for fqn, gradient in both.items():
        one, two, three, four = (part[fqn] for part in by_seed)
        torch.testing.assert_close(gradient, (one + two) / 2 + (three + four) / 2, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(gradient, one + three, rtol=1e-3), fqn


def with_other_values(rank: int, name: str) -> str:
    """A replica of which one parameter or buffer begins with another value."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    pipe = graphpp.compile(model, F.mse_loss, split=1, microbatches=2, mesh=mesh)
    if rank:
        model.state_dict()[name].add_(1)
    x = torch.randn(8, 4)
    with pytest.raises(graphpp.MismatchError) as error:
        pipe.step(x, target=x)
    model.load_state_dict({key: torch.zeros_like(value) for key, value in model.state_dict().items()})
    pipe.step(x, target=x)
    model.state_dict()["1.running_mean"].add_(rank)  # each replica has statistics of its own data
    pipe.step(x, target=x)
    return str(error.value)


@pytest.mark.parametrize("name", ["0.bias", "1.running_mean"])
def test_replicas_that_begin_with_other_values_are_refused(name: str) -> None:
    for text in run_ranks(with_other_values, 2, name):
        assert f"the values of {name}, with which replicas must begin alike" in text


def normalised(rank: int, alone: int | None, options: dict[str, Any]) -> tuple[dict[str, Tensor], float]:
    """Two steps of a model with batch norm, over replicas, or with the data of one replica; its state and a later loss."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp")) if alone is None else None
    torch.manual_seed(rank if options.get("replica_values") == "broadcast" else 0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    pipe = graphpp.compile(
        model, F.mse_loss, split=1, microbatches=2, mesh=mesh, parallel=graphpp.Parallel(**options)
    )
    for seed in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * seed + (rank if alone is None else alone)))
        pipe.step(x, target=x)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
    loss = pipe.eval(x, target=x).loss
    assert loss is not None
    return {key: value.clone() for key, value in model.state_dict().items()}, float(loss)


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("values", ["broadcast", *further("equal")])
@pytest.mark.parametrize("buffers", ["own", "average", "broadcast"])
def test_buffers_of_replicas(buffers: str, values: str) -> None:
    """Parameters do not change, so each replica's statistics are those of its data alone until they are shared."""
    first, second = (normalised(0, data, {})[0] for data in (0, 1))
    found = run_ranks(normalised, 2, None, {"replica_buffers": buffers, "replica_values": values})
    for rank, (state, _) in enumerate(found):
        for key, one in first.items():
            own = second[key] if rank else one
            if buffers == "own" or not one.is_floating_point():
                assert torch.equal(state[key], own), key
            elif buffers == "broadcast":
                assert torch.equal(state[key], one), key
            else:
                torch.testing.assert_close(state[key], (one + second[key]) / 2)
    assert (found[0][1] == found[1][1]) == (buffers != "own")


def other_calls(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    torch.manual_seed(0)
    pipe = graphpp.compile(torch.nn.Linear(4, 4), F.mse_loss, microbatches=2, mesh=mesh)
    x = torch.ones(8, 4)
    with pytest.raises(graphpp.MismatchError) as error:
        if rank:
            pipe.step(x, target=x)
        else:
            pipe.profile(x, target=x, repeat=1)
    return str(error.value)


def test_replicas_whose_first_calls_differ_are_refused() -> None:
    assert all("differs in the call: it has" in text for text in run_ranks(other_calls, 2))


def compiles_slowly(rank: int, slow: float) -> str:
    """A first step of two replicas, of which the first one compiles `slow` seconds longer, and a step for which it is late."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    torch.manual_seed(0)
    parallel = graphpp.Parallel(timeout=STEP, start_timeout=SOON)
    pipe = graphpp.compile(torch.nn.Linear(4, 4), F.mse_loss, microbatches=2, mesh=mesh, parallel=parallel)
    x = torch.ones(8, 4)

    def capture(*args: Any, **options: Any) -> Any:
        time.sleep(0 if rank else slow)
        return internals.capture(*args, **options)

    with internals.capturing_by(capture):
        pipe.step(x, target=x)
    if rank == 0:
        is_late()
    with pytest.raises((graphpp.RankFailure, graphpp.GraphPPError)) as error:
        pipe.step(x, target=x)
    gave_up()
    return f"{type(error.value).__name__}: {error.value}"


def test_a_replica_waits_for_another_s_start_and_names_it_if_late() -> None:
    slow, waiting = run_ranks(compiles_slowly, 2, STEP + 1)
    assert waiting.startswith("RankFailure: rank 0 (dp_replicate 0, pp 0) did not answer in time")
    assert slow.startswith("RankFailure: ")


class ByRank:
    """A split of the user's own that is another one on each rank."""

    def starts(self, calls: Sequence[ModuleCall]) -> tuple[int, ...]:
        layers = [call.position for call in calls if re.fullmatch(r"layers\.\d", call.fqn)]
        return (0, layers[1 + dist.get_rank()])


def unlike(rank: int, split: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    pipe = compiled(SPECIAL["plain"](), split=split[rank], microbatches=2, mesh=mesh)
    step(pipe, SPECIAL["plain"]().batch)


@pytest.mark.parametrize(
    ("split", "words"),
    [((CUTS[4], CUTS[2]), "differs in split=: it has "), ((ByRank(), ByRank()), "differs in the gradients of its stages")],
)
def test_replicas_that_hold_other_stages_are_refused(split: Any, words: str) -> None:
    with pytest.raises(graphpp.MismatchError, match=words):
        run_ranks(unlike, 2, split)


def experts(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp_replicate", "pp"))
    model = MoE(dist.group.WORLD)
    x, y = expert_batch(rank)
    graphpp.compile(model, F.cross_entropy, mesh=mesh, microbatches=3).step(x, target=y)


@pytest.mark.exhaustive
def test_experts_are_not_averaged_with_other_experts() -> None:
    with pytest.raises(graphpp.GraphPPError, match="exchanges values with rank"):
        run_ranks(experts, 2)


def outside(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0], mesh_dim_names=("dp_replicate",))
    if rank:
        compiled(SPECIAL["plain"](), mesh=mesh, microbatches=2)


def test_a_rank_outside_of_its_replicas_is_refused() -> None:
    with pytest.raises(graphpp.GraphPPError, match="rank 1 is not in the mesh"):
        run_ranks(outside, 2)


def pair(rank: int) -> graphpp.Pipeline:
    """One of two pipelines of one process each, which average their gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    return compiled(SPECIAL["plain"](), split=CUTS[2], mesh=mesh)


def at_odds(rank: int, what: str) -> None:
    pipe, batch = pair(rank), SPECIAL["plain"]().batch
    step(pipe, batch)
    if rank and what == "profile":
        pipe.profile(*batch.args, target=batch.target)
    elif rank and what == "no batch":
        pipe.step(batch.args[0][:0], target=batch.target)
    else:
        pipe.step_microbatches([graphpp.Microbatch(batch.args, {}, batch.target)] * (1 + rank))


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("microbatches", "differs in the schedule"),
        ("profile", "differs in the call"),
        ("no batch", "rank 1 (dp_replicate 1): BatchError"),
    ],
)
def test_replicas_that_do_not_do_the_same_are_refused(what: str, said: str) -> None:
    """Replicas in different calls would wait for each other's gradients, or average gradients of different steps."""
    first, second = rank_outcomes(at_odds, 2, what)
    assert isinstance(first.error, graphpp.MismatchError)
    assert said in str(first.error)
    assert isinstance(second.error, graphpp.GraphPPError)


def midway(rank: int) -> str:
    """Rank 0 fails in a backward, and calls the pipeline once more."""
    pipe, batch = pair(rank), SPECIAL["plain"]().batch
    step(pipe, batch)
    arguments = Task.arguments

    def failing(task: Task) -> list[Any]:
        if rank == 0 and task.key.phase.is_backward:
            raise ValueError("by chance")
        return arguments(task)

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ValueError):
        patch.setattr(Task, "arguments", failing)
        step(pipe, batch)
    step(pipe, batch)
    return "ended"


def test_a_replica_that_failed_midway_does_not_go_on() -> None:
    """A step of rank 0 alone would average its gradients with those of the step that rank 1 is still in."""
    failed, other = rank_outcomes(midway, 2)
    assert "ended midway" in str(failed.error)
    assert other.value is None
