"""The other calls of a pipeline with shards, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp.runtime.shards.local_rows import whole_tensor
from tests.distributed import run_ranks
from tests.sharding import Mesh, batch, compiled, example, odd, sgd
from tests.special_models import CUTS

SHARD2, PIPE = Mesh((2,), ("dp_shard",)), Mesh((2, 2), ("pp", "dp_shard"))


def evaluated(rank: int, mesh: Mesh, keep: int | None) -> None:
    """Evaluations before the first step, after an optimizer's step, and of other sizes."""
    torch.set_num_threads(1)
    options = {"split": CUTS[4 if "pp" in mesh.names else 1], "parallel": graphpp.Parallel(keep=keep)}
    own = dist.new_group([rank], use_local_synchronization=True)
    alone = graphpp.compile(odd(), F.cross_entropy, example=example(), microbatches=4, mesh=own)
    pipe, optimizer = compiled(mesh.made(), odd(), **options), None
    other = sgd(alone.parameters())
    for number in range(3):
        tokens, target = batch(number)
        for rows in (16, 8):
            found = pipe.eval(tokens[:rows], target=target[:rows])
            expected = alone.eval(tokens[:rows], target=target[:rows])
            assert torch.equal(found.loss, expected.loss)
            if found.output is not None:
                assert torch.equal(found.output, expected.output)
        pipe.step(tokens, target=target)
        alone.step(tokens, target=target)
        optimizer = optimizer or sgd(pipe.parameters())
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize(("mesh", "keep"), [(SHARD2, None), (PIPE, 1)])
def test_evaluations_are_those_of_one_process(mesh: Mesh, keep: int | None) -> None:
    run_ranks(evaluated, mesh.ranks, mesh, keep)


def overflowing(rank: int) -> tuple[float, dict[str, Tensor]]:
    """One replica's loss overflows in the second step: no rank's optimizer may step there."""
    torch.set_num_threads(1)
    pipe = compiled(PIPE.made(), odd(), split=CUTS[2], example=example())
    optimizer, scaler = sgd(pipe.parameters()), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []
    for number in range(3):
        tokens, target = batch(number)
        weight = 3e38 if number == 1 and rank % 2 else 1.0
        pipe.step(tokens, target=target, scaler=scaler, loss_weight=[weight] * 4)
        scaler.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        before = {fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()}
        scaler.step(optimizer)
        scaler.update()
        after = {fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()}
        assert all(torch.equal(before[fqn], after[fqn]) for fqn in before) == (number == 1)
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales == [16.0, 8.0, 16.0]
    return scales[-1], after


def test_an_overflow_of_one_replica_skips_the_step_everywhere() -> None:
    run_ranks(overflowing, 4)


def accumulated(rank: int) -> None:
    """Two steps without zero_grad add up, as do steps after `set_to_none=False`."""
    pipe = compiled(SHARD2.made(), odd(), example=example())
    first = batch(rank)
    pipe.step(first[0], target=first[1])
    once = {fqn: whole_tensor(p.grad).clone() for fqn, p in pipe.named_parameters() if p.grad is not None}
    pipe.step(first[0], target=first[1])
    for fqn, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(whole_tensor(parameter.grad), 2 * once[fqn], rtol=1e-6, atol=1e-7)
    pipe.zero_grad(set_to_none=False)
    pipe.step(first[0], target=first[1])
    for fqn, parameter in pipe.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(whole_tensor(parameter.grad), once[fqn])


def test_gradients_of_several_steps_add_up() -> None:
    run_ranks(accumulated, 2)


def hooked(rank: int) -> list[str]:
    pipe, seen = compiled(SHARD2.made(), odd(), example=example()), []
    for fqn, parameter in pipe.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p, fqn=fqn: seen.append(f"{fqn} {list(p.grad.shape)}"))
    tokens, target = batch(0)
    pipe.step(tokens, target=target)
    return seen


def test_hooks_see_the_sharded_gradients() -> None:
    for seen in run_ranks(hooked, 2):
        assert "embed.weight [13, 7]" in seen
        assert not any("unused" in text for text in seen)


def refused(rank: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def expect(name: str, call: Any) -> None:
        with pytest.raises(graphpp.GraphPPError) as error:
            call()
        found[name] = str(error.value)

    mesh, (tokens, target) = SHARD2.made(), batch(0)
    model = odd()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    pipe = compiled(mesh, model, example=example())
    expect("an early optimizer", early.step)
    expect("a second pipeline", lambda: graphpp.compile(model, F.cross_entropy))
    expect("PostValidation", lambda: graphpp.PostValidation(pipe, sgd(pipe.parameters()), 1.0))
    kept = model.embed.weight
    model.embed.weight = nn.Parameter(torch.zeros(13, 7))
    expect("an exchanged parameter", lambda: pipe.step(tokens, target=target))
    model.embed.weight = kept
    turned = nn.Linear(4, 3)
    turned.weight = nn.Parameter(torch.randn(4, 3).t())
    x = torch.zeros(8, 4)
    expect("strides", lambda: graphpp.compile(turned, F.mse_loss, mesh=mesh).step(x, target=x[:, :3]))
    assert type(turned.bias) is nn.Parameter
    watched = nn.Linear(4, 3)
    watched.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    expect("a hook", lambda: graphpp.compile(watched, F.mse_loss, mesh=mesh).step(x, target=x[:, :3]))
    expect("keep", lambda: graphpp.Parallel(keep=0))
    return found


def test_refusals_say_what_to_do() -> None:
    for found in run_ranks(refused, 2):
        assert "they are sharded over dp_shard now. Make the optimizer of pipe.parameters()" in found["an early optimizer"]
        assert "another pipeline has sharded the model's parameters" in found["a second pipeline"]
        assert "use pipe.clip_grad_norm_" in found["PostValidation"]
        assert "another object stands in the place of embed.weight" in found["an exchanged parameter"]
        assert "parameter.data.contiguous()" in found["strides"]
        assert "register hooks on pipe.parameters()" in found["a hook"]
        assert "keep" in found["keep"]


def with_other_values(rank: int, values: Any) -> str | None:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    pipe = graphpp.compile(
        model, F.mse_loss, mesh=SHARD2.made(), microbatches=2, parallel=graphpp.Parallel(replica_values=values)
    )
    x = torch.ones(8, 4)
    if values == "broadcast":
        torch.manual_seed(0)
        first = nn.Linear(4, 4)
        pipe.eval(x, target=x)
        assert torch.equal(pipe.gather()["0.weight"], first.weight)
        pipe.step(x, target=x)
        return None
    with pytest.raises(graphpp.MismatchError) as error:
        pipe.step(x, target=x)
    return str(error.value)


@pytest.mark.parametrize("values", ["equal", "broadcast"])
def test_replicas_begin_alike(values: str) -> None:
    for text in run_ranks(with_other_values, 2, values):
        assert values == "broadcast" or "the values of 0.bias, with which replicas must begin alike" in text


def profiled(rank: int) -> float:
    torch.set_num_threads(1)
    pipe = compiled(PIPE.made(), odd(), split=CUTS[2], example=example())
    tokens, target = batch(PIPE.replica(rank))
    before = {fqn: whole_tensor(parameter).clone() for fqn, parameter in pipe.named_parameters()}
    found = pipe.profile(tokens, target=target)
    assert all(torch.equal(before[fqn], whole_tensor(parameter)) for fqn, parameter in pipe.named_parameters())
    assert all(parameter.grad is None for parameter in pipe.parameters())
    return found.timeline.makespan


def test_a_profile_runs_sharded_stages() -> None:
    assert all(found > 0 for found in run_ranks(profiled, 4))
