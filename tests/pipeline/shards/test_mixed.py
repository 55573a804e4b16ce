"""Shards in float32 that compute and send in bfloat16: the bits of a plain loop over replicas, microbatches and ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphpp
from graphpp.runtime.dtensors import whole_tensor
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.sharding import ROWS, STEPS, Mesh, RunningMean, Trained, batch, compiled, example, odd, sgd, train_on_mesh
from tests.special_models import CUTS

ONE, SHARD2, SHARD3, SHARD4 = (Mesh((ranks,), ("dp_shard",)) for ranks in (1, 2, 3, 4))
PIPE, HYBRID = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("dp_replicate", "dp_shard"))
BF16, FP32 = torch.bfloat16, torch.float32
MICROBATCHES = 4


class Case(NamedTuple):
    """The three dtypes of a training; None: left out."""

    param_dtype: torch.dtype | None = BF16
    reduce_dtype: torch.dtype | None = None
    sum_dtype: torch.dtype | None = None

    def options(self, stages: int = 1, schedule: str = "auto", keep: int | None = None) -> dict[str, Any]:
        parallel = graphpp.Parallel(keep=keep, param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        gradients = graphpp.Gradients(dtype=self.sum_dtype)
        return {"split": CUTS[stages], "schedule": schedule, "parallel": parallel, "gradients": gradients}


def gradients_of_replica(model: nn.Module, case: Case, number: int, replica: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The losses of the microbatches, and the sums of their gradients as they are sent."""
    tokens, target = batch(100 * number + replica)
    losses, sums = [], dict[str, Tensor]()
    for rows in range(0, ROWS, ROWS // MICROBATCHES):
        part = slice(rows, rows + ROWS // MICROBATCHES)
        loss = F.cross_entropy(model(tokens[part]), target[part])
        loss.backward(torch.tensor(1 / MICROBATCHES, dtype=loss.dtype))
        losses.append(loss.detach())
        for fqn, parameter in model.named_parameters():
            if parameter.grad is not None:
                wide = parameter.grad if case.sum_dtype is None else parameter.grad.to(case.sum_dtype)
                sums[fqn] = wide if fqn not in sums else sums[fqn] + wide
                parameter.grad = None
    return torch.stack(losses), {fqn: total.to(case.reduce_dtype or total.dtype) for fqn, total in sums.items()}


def train_in_a_loop(mesh: Mesh, case: Case, tied: bool = False) -> list[Trained]:
    """Plain eager: cast copies of the model for each replica, sums over the ranks in float32 and in order, steps in float32."""
    master, replicas = odd(tied=tied, statistics=RunningMean), mesh.replicas
    copies = [copy.deepcopy(master) for _ in range(replicas)]  # each has its own buffers
    optimizer = sgd(master.parameters())
    found = [Trained([], [], [], {}) for _ in range(replicas)]
    for number in range(STEPS):
        sent = []
        for replica, model in enumerate(copies):
            for own, parameter in zip(model.parameters(), master.parameters(), strict=True):
                own.data = parameter.detach().to(case.param_dtype or own.dtype)
            losses, sums = gradients_of_replica(model, case, number, replica)
            found[replica].losses.append(losses)
            sent.append(sums)
        for fqn, parameter in master.named_parameters():
            if fqn in sent[0]:
                parameter.grad = averaged([sums[fqn] for sums in sent], mesh)
        for each in found:
            each.grads.append({fqn: None if p.grad is None else p.grad.clone() for fqn, p in master.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    for each in found:
        each.params.update({fqn: parameter.detach().clone() for fqn, parameter in master.named_parameters()})
    return found


def averaged(sent: list[Tensor], mesh: Mesh) -> Tensor:
    """The sums over the ranks of `dp_shard` in order, then over their copies in order."""
    shards = mesh.sizes[mesh.names.index("dp_shard")]
    sums = []
    for first in range(0, len(sent), shards):
        total = sent[first].float()
        for each in sent[first + 1 : first + shards]:
            total = total + each.float()
        sums.append(total)
    total = sums[0]
    for each in sums[1:]:
        total = total + each
    return total / len(sent)


def differing(found: Trained, expected: Trained) -> list[str]:
    pairs = enumerate(zip(found.losses, expected.losses, strict=True))
    names = [f"losses of step {step}" for step, pair in pairs if not torch.equal(*pair)]
    for step, grads in enumerate(found.grads):
        for fqn, grad in grads.items():
            other = expected.grads[step][fqn]
            if (grad is None) != (other is None) or (grad is not None and other is not None and not same(grad, other)):
                names.append(f"gradient of {fqn} in step {step}")
    return names + [fqn for fqn, value in found.params.items() if not same(value, expected.params[fqn])]


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


CASES = [Case(), Case(sum_dtype=FP32), Case(sum_dtype=FP32, reduce_dtype=BF16), Case(param_dtype=None, reduce_dtype=BF16)]


@pytest.mark.parametrize(
    ("mesh", "stages", "schedule", "keep", "case"),
    [
        (SHARD3, 2, "LoopedBFS", 1, CASES[2]),
        *further(
            (SHARD3, 1, "auto", None, CASES[3]),
            (SHARD2, 1, "auto", None, CASES[0]),
            (PIPE, 4, "Interleaved1F1B", None, CASES[1]),
            (HYBRID, 2, "LoopedBFS", 1, CASES[0]),
            (ONE, 2, "LoopedBFS", 1, CASES[0]),
            (SHARD4, 1, "auto", None, CASES[0]),
            (PIPE, 4, "LoopedBFS", 1, CASES[0]),
            (SHARD4, 1, "auto", None, CASES[2]),
            (PIPE, 2, "1F1B", None, CASES[0]),
            (PIPE, 4, "ZBVZeroBubble", None, CASES[0]),
            (PIPE, 4, "DualPipeV", None, CASES[2]),
        ),
    ],
)
def test_a_step_has_the_bits_of_a_plain_loop(mesh: Mesh, stages: int, schedule: str, keep: int | None, case: Case) -> None:
    expected = train_in_a_loop(mesh, case)
    given = case.options(stages, schedule, keep)
    for rank, found in enumerate(run_ranks(train_on_mesh, mesh.ranks, mesh, given, False, None, RunningMean)):
        assert differing(found, expected[mesh.replica(rank)]) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "stages", "schedule", "keep"), [(PIPE, 4, "Interleaved1F1B", 1), *further((HYBRID, 1, "auto", None))]
)
def test_tied_parameters_and_cut_sums_differ_by_rounding(mesh: Mesh, stages: int, schedule: str, keep: int | None) -> None:
    """A stage that is reduced several times rounds each of its sums to bfloat16; norms are equal on all ranks."""
    case, expected = CASES[0], train_in_a_loop(mesh, CASES[0], tied=True)
    given = case.options(stages, schedule, keep)
    ranks = run_ranks(train_on_mesh, mesh.ranks, mesh, given, True, 1e9, RunningMean)
    for rank, found in enumerate(ranks):
        assert torch.equal(torch.stack(found.norms), torch.stack(ranks[0].norms))
        for fqn, grad in found.grads[0].items():
            other = expected[mesh.replica(rank)].grads[0][fqn]
            assert (grad is None) == (other is None)
            if grad is not None and other is not None:
                assert grad.dtype == FP32
                assert (grad - other).abs().max() <= 2**-6 * other.abs().max(), fqn


def pipeline(mesh: Mesh, stages: int = 1, keep: int | None = None, **dtypes: Any) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    parallel = graphpp.Parallel(keep=keep, **dtypes)
    model = odd(statistics=RunningMean)
    return compiled(mesh.made(), model, split=CUTS[stages], example=example(), parallel=parallel)


def cast(state: dict[str, Tensor], model: nn.Module) -> nn.Module:
    """The model in eager with these values, its parameters in bfloat16."""
    model.load_state_dict(state)
    for parameter in model.parameters():
        parameter.data = parameter.detach().to(BF16)
    return model


def evaluated(rank: int, mesh: Mesh, keep: int | None) -> None:
    """Evaluations see the values of now, also those of 0-dim parameters, and those computed once per step."""
    pipe, optimizer = pipeline(mesh, 4 if "pp" in mesh.names else 1, keep, param_dtype=BF16), None
    for number in range(3):
        tokens, target = batch(number)
        if number:
            model = cast(pipe.gather(rank=None), odd(statistics=RunningMean)).eval()
            pipe._model.eval()
            found = pipe.eval(tokens, target=target)
            expected = torch.cat([model(part) for part in tokens.chunk(MICROBATCHES)])
            assert found.output is None or torch.equal(found.output, expected)
            pipe._model.train()
        pipe.step(tokens, target=target)
        optimizer = optimizer or sgd(pipe.parameters())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("mesh", "keep"), [(SHARD2, None), *further((PIPE, 1))])
def test_evaluations_are_those_of_the_cast_model(mesh: Mesh, keep: int | None) -> None:
    run_ranks(evaluated, mesh.ranks, mesh, keep)


def continued(rank: int, before: Mesh, after: Mesh, folder: Path, dtypes: list[torch.dtype | None]) -> dict[str, Tensor]:
    """Two steps, a checkpoint, and two steps of another pipeline; the values at the end, states of the optimizer included."""
    found: dict[str, Tensor] = {}
    for mesh, dtype, numbers in ((before, dtypes[0], range(2)), (after, dtypes[1], range(2, 4))):
        pipe = pipeline(mesh, 2 if "pp" in mesh.names else 1, param_dtype=dtype)
        optimizer = torch.optim.AdamW(list(pipe.parameters()), lr=1e-2)
        checkpoint = pipe.checkpoint(optimizer)
        if numbers.start:
            checkpoint.load(folder / "run")
            assert same_values(values(pipe, optimizer), torch.load(folder / f"{rank}.pt"))
        for number in numbers:
            tokens, target = batch(number)
            pipe.step(tokens, target=target)
            optimizer.step()
            optimizer.zero_grad()
        found = values(pipe, optimizer)
        if not numbers.start:
            torch.save(found, folder / f"{rank}.pt")
            checkpoint.save(folder / "run")
    return found


def values(pipe: graphpp.Pipeline, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {key: whole_tensor(value).clone() for key, value in pipe.state_dict().items()}
    for fqn, parameter in pipe.named_parameters():
        found |= {f"{fqn} {name}": whole_tensor(value).clone() for name, value in optimizer.state.get(parameter, {}).items()}
    assert all(value.dtype == FP32 for value in found.values())
    return found


def same_values(found: dict[str, Tensor], was: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, was[name]) for name, value in found.items() if name in was)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtypes", [[None, BF16], *further([BF16, None], [BF16, BF16])])
def test_checkpoints_fit_pipelines_of_every_dtype(dtypes: list[torch.dtype | None], tmp_path: Path) -> None:
    """All replicas have one batch, so the training of two ranks is that of four."""
    turned = Mesh((4,), ("dp_shard",))
    ranks = run_ranks(continued, 4, turned, PIPE, tmp_path, dtypes)
    if dtypes == [BF16, BF16]:
        (tmp_path / "other").mkdir()
        expected = run_ranks(continued, 4, turned, turned, tmp_path / "other", dtypes)
        assert all(same_values(found, expected[0]) for found in ranks)


class Bounded(nn.Linear):
    """A layer whose weight is computed of its parameter, once per step."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.tanh(self.weight) @ self.weight, self.bias)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Bounded(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def once_per_step(rank: int, keep: int) -> None:
    torch.manual_seed(0)
    model = Shared()
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
    whole = copy.deepcopy(model)
    pipe = graphpp.compile(
        model, F.mse_loss, mesh=SHARD2.made(), split=CUTS[4], schedule="LoopedBFS", microbatches=4,
        example=graphpp.Microbatch((x[:2],), target=x[:2]), parallel=graphpp.Parallel(keep=keep, param_dtype=BF16),
    )  # fmt: skip
    optimizer = torch.optim.SGD(list(pipe.parameters()), lr=0.1)
    for _ in range(3):
        found = pipe.step(x, target=x).losses
        with torch.no_grad():
            expected = [F.mse_loss(cast(whole.state_dict(), Shared())(part), part) for part in x.split(2)]
        assert torch.equal(found, torch.stack(expected))
        optimizer.step()
        optimizer.zero_grad()
        whole.load_state_dict(pipe.gather(rank=None))


@pytest.mark.parametrize("keep", [0, *further(1, 2)])
def test_values_of_weights_alone_are_computed_while_their_stage_is_whole(keep: int) -> None:
    run_ranks(once_per_step, 2, keep)


def refused(rank: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def expect(name: str, call: Any) -> None:
        with pytest.raises(graphpp.GraphPPError) as error:
            call()
        found[name] = str(error.value)

    half, own = graphpp.Parallel(param_dtype=BF16), Mesh((2,), ("dp_replicate",)).made()
    x, layer = torch.zeros(8, 4), nn.Linear(4, 4)
    expect("no shards", lambda: graphpp.compile(layer, F.mse_loss, mesh=own, parallel=half))
    expect("no mesh", lambda: graphpp.compile(layer, F.mse_loss, parallel=graphpp.Parallel(reduce_dtype=BF16)))
    microbatch = graphpp.Microbatch((x,), target=x)
    expect("verify", lambda: graphpp.verify(layer, F.mse_loss, example=microbatch, parallel=half))
    expect("integers", lambda: graphpp.Parallel(param_dtype=torch.int8))
    mesh = SHARD2.made()
    expect("a float input", lambda: graphpp.compile(layer, F.mse_loss, mesh=mesh, parallel=half).step(x, target=x))
    graphpp.compile(layer, F.mse_loss, mesh=mesh, parallel=half).step(x.bfloat16(), target=x.bfloat16())
    return found


def test_refusals_say_what_to_do() -> None:
    for found in run_ranks(refused, 2):
        assert "give a mesh= with this dimension, of one rank where nothing is to be cut" in found["no shards"]
        assert "parallel.param_dtype and parallel.reduce_dtype" in found["no mesh"]
        assert "its parameters in the dtype in which they are to compute" in found["verify"]
        assert "parallel.param_dtype: take a floating torch.dtype of 16 bits or more" in found["integers"]
        assert "bfloat16" in found["a float input"]
        assert "batch of the model's dtype" in found["a float input"]


def kept(rank: int, folder: Path) -> list[int]:
    """How often pipelines of one model capture."""
    found, mesh, tokens = [], ONE.made(), torch.arange(8)
    for dtype in (BF16, None, BF16, torch.float16):
        parallel = graphpp.Parallel(param_dtype=dtype)
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8))
        with internals.captures() as made:
            pipe = graphpp.compile(model, F.cross_entropy, mesh=mesh, microbatches=2, parallel=parallel, artifact=folder)
            assert pipe.step(tokens, target=tokens).losses.dtype == (dtype or FP32)
        found.append(len(made))
    return found


def test_a_saved_graph_is_for_one_dtype(tmp_path: Path) -> None:
    assert run_ranks(kept, 1, tmp_path)[0] == [1, 1, 0, 1]
