"""The other calls of a pipeline with shards, and what it refuses."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp._torch.this_thread import replaced
from graphpp.runtime.dtensors import whole_tensor
from graphpp.runtime.fsdp.sharded_gradients import ShardedGradients
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import Mesh, batch, compiled, example, odd, sgd
from tests.special_models import CUTS

SHARD2, PIPE = Mesh((2,), ("dp_shard",)), Mesh((2, 2), ("pp", "dp_shard"))


Evaluations = list[tuple[Tensor, Tensor | None]]  # loss and output


def evaluations(pipe: graphpp.Pipeline) -> Evaluations:
    """Evaluations before the first step, after an optimizer's step, and of other sizes."""
    found, optimizer = [], None
    for number in range(3):
        tokens, target = batch(number)
        for rows in (16, 8):
            result = pipe.eval(tokens[:rows], target=target[:rows])
            found.append((result.loss, result.output))
        pipe.step(tokens, target=target)
        optimizer = optimizer or sgd(pipe.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return found


def evaluated(rank: int, mesh: Mesh, keep: int | None) -> Evaluations:
    torch.set_num_threads(1)
    split = CUTS[4 if "pp" in mesh.names else 1]
    return evaluations(compiled(mesh.made(), odd(), split=split, parallel=graphpp.Parallel(keep=keep)))


@cache
def evaluated_alone() -> Evaluations:
    return evaluations(compiled(None, odd(), example=example()))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "keep"), [(SHARD2, 0), *further((SHARD2, None), (PIPE, 1))])
def test_evaluations_are_those_of_one_process(mesh: Mesh, keep: int | None) -> None:
    ranks = run_ranks(evaluated, mesh.ranks, mesh, keep)
    assert all(found[0][1] is not None for found in ranks[-mesh.size("dp_shard") :])  # the last stage has the outputs
    for found in ranks:
        for (loss, output), (expected_loss, expected_output) in zip(found, evaluated_alone(), strict=True):
            assert torch.equal(loss, expected_loss)
            assert output is None or torch.equal(output, expected_output)


def without_coalesced_gathers(rank: int, keep: int | None) -> None:
    """A step, its norm and an evaluation over gloo, whose coalesced gathers corrupt memory beside other collectives."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a coalesced gather over gloo")

    pipe = compiled(SHARD2.made(), odd(), split=CUTS[1], parallel=graphpp.Parallel(keep=keep))
    tokens, target = batch(rank)
    with replaced(dist.ProcessGroup, "allgather_into_tensor_coalesced", refuse):
        pipe.step(tokens, target=target)
        pipe.clip_grad_norm_(1.0)
        pipe.eval(tokens, target=target)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("keep", [None, 0])
def test_no_gather_over_gloo_is_coalesced(keep: int | None) -> None:
    run_ranks(without_coalesced_gathers, 2, keep)


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


def order_of_sums(rank: int, mesh: Mesh) -> list[str]:
    """The reductions of one rank's stages, and the parameters whose sums over copies start, in order."""
    torch.set_num_threads(1)
    log = list[str]()
    pipe = compiled(mesh.made(), odd(tied=True), split=CUTS[4])
    reduce, start = ShardedGradients.reduce, ShardedGradients._start_over_copies

    def reducing(self: ShardedGradients, stage: int, whole: bool = False) -> None:
        log.append(f"reduce {stage}")
        reduce(self, stage, whole)

    def starting(self: ShardedGradients, totals: Any, fqns: Any) -> None:
        log.extend(fqns)
        start(self, totals, fqns)

    with replaced(ShardedGradients, "reduce", reducing), replaced(ShardedGradients, "_start_over_copies", starting):
        tokens, target = batch(0)
        pipe.step(tokens, target=target)
    return log


def test_sums_over_copies_run_beside_the_backward_of_earlier_stages() -> None:
    mesh = Mesh((2, 2), ("dp_replicate", "dp_shard"))
    first, *others = run_ranks(order_of_sums, mesh.ranks, mesh)
    assert all(each == first for each in others)
    assert first.index("norm.weight") < first.index("reduce 1") < first.index("layers.0.0.weight")
    assert first.index("embed.weight") > first.index("reduce 0"), "two stages add to a tied parameter"
    names = [each for each in first if not each.startswith("reduce")]
    assert len(names) == len(set(names)), "each parameter is summed once"


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
    expect("keep", lambda: graphpp.Parallel(keep=-1))
    return found


def test_refusals_say_what_to_do() -> None:
    for found in run_ranks(refused, 2):
        assert "they are sharded over dp_shard now. Make the optimizer of pipe.parameters()" in found["an early optimizer"]
        assert re.match(r".*another pipeline has sharded [\w.]+ over its ranks, by dp_shard", found["a second pipeline"])
        assert "another object stands in the place of embed.weight" in found["an exchanged parameter"]
        assert "parameter.data.contiguous()" in found["strides"]
        assert "register hooks on pipe.parameters()" in found["a hook"]
        assert "keep" in found["keep"]


class ByShape(nn.Module):
    """A forward that calls its layers in another order for one row: replicas may make gradients in other orders."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            return torch.tanh(self.a(x)) + torch.relu(self.b(x)) * self.c(x)
        return self.c(x) * torch.relu(self.b(x)) + torch.tanh(self.a(x))


def by_shape(rank: int, dimension: str) -> None:
    torch.manual_seed(0)
    model = ByShape()
    batches = [torch.randn(8 if replica == 0 else 4, 4, generator=torch.Generator().manual_seed(replica)) for replica in (0, 1)]
    expected: dict[str, Tensor] = {}
    for x in batches:
        for part in x.chunk(4):
            (F.mse_loss(model(part), part) / 4 / 2).backward()
    expected = {fqn: parameter.grad.clone() for fqn, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    pipe = graphpp.compile(model, F.mse_loss, mesh=Mesh((2,), (dimension,)).made(), microbatches=4)
    pipe.step(batches[rank], target=batches[rank])
    for fqn, parameter in pipe.named_parameters():
        torch.testing.assert_close(whole_tensor(parameter.grad), expected[fqn], rtol=1e-5, atol=1e-7, msg=fqn)


@pytest.mark.parametrize("dimension", ["dp_shard", "dp_replicate"])
def test_replicas_may_make_gradients_in_other_orders(dimension: str) -> None:
    run_ranks(by_shape, 2, dimension)


class GivesWeights(nn.Module):
    """Parameters and views of them are part of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x, self.layers[0].weight.t(), self.layers[3].bias


def gives_weights(rank: int, keep: int | None) -> None:
    torch.manual_seed(0)
    model, x = GivesWeights(), torch.ones(8, 4)
    weight, bias = model.layers[0].weight.detach().clone(), model.layers[3].bias.detach().clone()
    pipe = graphpp.compile(
        model, lambda output, target: F.mse_loss(output[0], target), mesh=SHARD2.made(), split=CUTS[4], schedule="LoopedBFS",
        microbatches=1, parallel=graphpp.Parallel(keep=keep),
    )  # fmt: skip
    for _ in range(2):
        _, first, last = pipe.eval(x, target=x).output
        assert torch.equal(first, weight.t())
        assert torch.equal(last, bias)
        pipe.step(x, target=x)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("keep", [None, 0, 1])
def test_outputs_may_be_parameters(keep: int | None) -> None:
    run_ranks(gives_weights, 2, keep)


def edges(rank: int) -> None:
    """Fewer rows than ranks in all norms; gradients of before; dtypes of gradients."""
    mesh, x = Mesh((3,), ("dp_shard",)).made(), torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1, bias=False))
    model[0].weight.grad_dtype = torch.float64
    pipe = graphpp.compile(model, F.mse_loss, mesh=mesh, microbatches=2, gradients=graphpp.Gradients(dtype=torch.float64))
    pipe.step(x, target=x[:, :1])
    grads = [whole_tensor(parameter.grad) for parameter in pipe.parameters()]
    assert [grad.dtype for grad in grads] == [torch.float64, torch.float32, torch.float32]
    for order in (1.0, 2.0, 3.0, float("inf"), 0.0):
        each = torch.stack([torch.linalg.vector_norm(grad, order).float() for grad in grads])
        torch.testing.assert_close(pipe.clip_grad_norm_(1e9, order).float(), torch.linalg.vector_norm(each, order))
    began = nn.Linear(4, 4)
    began(x).sum().backward()
    with pytest.raises(graphpp.GraphPPError, match=r"weight has a gradient.*zero_grad"):
        graphpp.compile(began, F.mse_loss, mesh=mesh).step(x, target=x)


def test_few_rows_and_gradients_of_before() -> None:
    run_ranks(edges, 3)


def partly_on_meta(rank: int) -> None:
    """One rank's layers have no memory yet: nothing is sharded before all have values."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.BatchNorm1d(4))
    whole = {key: value.clone() for key, value in model.state_dict().items()}
    model[0].to("meta")
    x = torch.ones(8, 4)
    pipe = graphpp.compile(
        model, F.mse_loss, mesh=PIPE.made(), split=["2"], microbatches=2, example=graphpp.Microbatch((x[:4],), target=x[:4])
    )
    assert all(type(parameter) is nn.Parameter for parameter in pipe.parameters())
    pipe.materialize(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None, seed=1)
    pipe.load_state_dict(whole)
    assert all(torch.equal(whole_tensor(value), whole[key]) for key, value in pipe.state_dict().items())
    pipe.step(x, target=x)


def test_a_model_that_is_partly_on_meta_is_sharded_when_all_have_values() -> None:
    run_ranks(partly_on_meta, 4)
