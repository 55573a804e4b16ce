"""Calls of a pipeline with `ep` that have more than one step: sums of gradients, buffers, other shapes, one rank along `ep`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.expert_parallel import Mixture, mixture
from tests.sharding import Mesh
from tests.tensor_parallel import batch, compiled

EXPERTS, PIPE, REPLICAS = Mesh((2,), ("ep",)), Mesh((2, 2), ("pp", "ep")), Mesh((2, 2), ("dp_replicate", "ep"))


def accumulated(rank: int, mesh: Mesh) -> None:
    torch.set_num_threads(1)
    made = mesh.made()
    pipe = compiled(made, mixture(made["ep"]), split=["layers.1"], schedule="1F1B")
    tokens, target = batch(mesh.replica(rank))
    pipe.step(tokens, target=target)
    once = {fqn: whole_tensor(each.grad).clone() for fqn, each in pipe.named_parameters()}
    pipe.step(tokens, target=target)
    for fqn, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole_tensor(parameter.grad), 2 * once[fqn])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh",), [(REPLICAS,), *further((PIPE,), (Mesh((2, 2), ("dp_shard", "ep")),))])
def test_gradients_of_two_steps_add_up(mesh: Mesh) -> None:
    run_ranks(accumulated, mesh.ranks, mesh)


class Counting(Mixture):
    """The model with a buffer of each expert that a forward writes, and one of the whole model."""

    def __init__(self, mesh: Any) -> None:
        super().__init__(mesh.get_group())
        self.register_buffer("seen", distribute_tensor(torch.arange(4.0), mesh, [Shard(0)]))
        self.register_buffer("steps", torch.zeros(2))
        for layer in self.layers:
            for name, weight in list(layer.experts.named_parameters()):
                setattr(layer.experts, name, torch.nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        seen = self.seen.to_local()
        seen.add_(1)
        self.steps.add_(tokens[:1, :2].flatten())
        return super().forward(tokens)


def counted(rank: int, mesh: Mesh, how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    torch.set_num_threads(1)
    made = mesh.made()
    torch.manual_seed(0)
    model = Counting(made["ep"])
    pipe = compiled(made, model, parallel=graphpp.Parallel(replica_buffers=how))
    tokens, target = batch(rank)
    pipe.step(tokens, target=target)
    return whole_tensor(dict(pipe.named_buffers())["seen"]).clone(), dict(pipe.named_buffers())["steps"].clone()


@pytest.mark.parametrize(
    ("mesh", "how"), [(REPLICAS, "broadcast"), *further((REPLICAS, "average"), (EXPERTS, "average"), (EXPERTS, "broadcast"))]
)
def test_buffers_of_experts_are_shared_with_the_ranks_that_have_them(mesh: Mesh, how: str) -> None:
    found = run_ranks(counted, mesh.ranks, mesh, how)
    assert all(torch.equal(seen, torch.arange(4.0) + 4) for seen, _ in found)
    assert all(torch.equal(steps, found[0][1]) for _, steps in found)


def other_rows(rank: int) -> list[str]:
    """The messages of a step and an evaluation in which the ranks give other numbers of rows, both sizes known."""
    torch.set_num_threads(1)
    made = EXPERTS.made()
    pipe = compiled(made, mixture(made["ep"]), microbatches=2)
    tokens, target = batch(0)
    for rows in (4, 8):
        pipe.step(tokens[:rows], target=target[:rows])
        pipe.eval(tokens[:rows], target=target[:rows])
    found, rows = [], 4 * (rank + 1)
    for call in (pipe.step, pipe.eval):
        with pytest.raises(graphpp.MismatchError) as caught:
            call(tokens[:rows], target=target[:rows])
        found.append(str(caught.value))
    pipe.step(tokens, target=target)
    return found


def test_other_shapes_on_another_rank_are_refused() -> None:
    for messages in run_ranks(other_rows, 2):
        assert all("shapes of the microbatches" in message for message in messages)


def captures_anew(rank: int) -> str:
    """The message of a step that rank 1 along `ep` would capture again, and the others run from their cache."""
    torch.set_num_threads(1)
    made, (tokens, target) = EXPERTS.made(), batch(0)
    pipe = compiled(made, mixture(made["ep"]), microbatches=2)
    pipe.step(tokens, target=target)
    if rank == 1:
        pipe.recapture()
    with pytest.raises(graphpp.MismatchError) as caught:
        pipe.step(tokens, target=target)
    return str(caught.value)


def test_a_rank_that_would_capture_anew_alone_is_refused() -> None:
    for message in run_ranks(captures_anew, 2):
        assert "what it has kept for this call" in message


def alone_along_ep(rank: int, mesh: Mesh, folder: Path) -> None:
    """A clipped step of AdamW, a scaler and a checkpoint where one rank along `ep` has all experts."""
    torch.set_num_threads(1)
    made = mesh.made()
    pipe = compiled(made, mixture(made["ep"]), split=["layers.1"], schedule="1F1B")
    assert all(not isinstance(each, DTensor) or len(each.placements) == each.device_mesh.ndim for each in pipe.parameters())
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    tokens, target = batch(mesh.replica(rank))
    expected = mixture(None)
    for _ in range(2):
        pipe.step(tokens, target=target)
        norm = pipe.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert norm.isfinite()
    pipe.checkpoint(optimizer).save(folder)
    pipe.checkpoint(optimizer).load(folder)
    assert {key for key in pipe.gather(rank=None)} == set(expected.state_dict())


@pytest.mark.parametrize(
    ("mesh",), [(Mesh((1, 1), ("pp", "ep")),), *further((Mesh((2, 1), ("dp_shard", "ep")),), (Mesh((2, 1), ("pp", "ep")),))]
)
def test_one_rank_along_ep_has_all_experts(mesh: Mesh, tmp_path: Path) -> None:
    run_ranks(alone_along_ep, mesh.ranks, mesh, tmp_path)
