"""`keep=0`: programs gather and reduce one layer at a time. The numbers of whole stages, and the bytes that the plan says."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import graphpp
from graphpp.parallel import ordered_sums
from graphpp.runtime.dtensors import whole_tensor
from graphpp.runtime.fsdp import sharded_gradients
from graphpp.runtime.fsdp.sharded_gradients import LayerReducer, LayerSink
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.pipeline.shards.test_training import HYBRID, PIPE, SHARD3, SHARD4, TURNED, assert_close, options
from tests.sharding import Mesh, train_alone, train_on_mesh

GATHER = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
MOMENT = 10.0  # seconds in which a thread that is ready gets to run, also on a busy machine


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("mesh", "stages", "schedule", "tied"),
    [
        (PIPE, 4, "ZBVZeroBubble", True),
        *further(
            (SHARD3, 2, "LoopedBFS", True),
            (HYBRID, 1, "auto", False),
            (SHARD4, 1, "auto", False),
            (PIPE, 2, "1F1B", False),
            (PIPE, 4, "DualPipeV", True),
            (TURNED, 4, "InterleavedZeroBubble", False),
            (Mesh((2, 2), ("dp_shard", "cp")), 2, "GPipe", False),
        ),
    ],
)
def test_gradients_and_norms_are_those_of_a_loop_but_for_rounding(
    mesh: Mesh, stages: int, schedule: str, tied: bool
) -> None:
    """Each microbatch is summed over the ranks first."""
    expected = train_alone(mesh.replicas, tied, 0.5)
    ranks = run_ranks(train_on_mesh, mesh.ranks, mesh, options(stages, schedule, 0), tied, 0.5)
    for rank, found in enumerate(ranks):
        assert_close(found, expected[mesh.replica(rank)])
        assert torch.equal(torch.stack(found.norms), torch.stack(ranks[0].norms))


class Counted(TorchDispatchMode):
    """The gathers of a step, the bytes that this rank sends along the mesh, and the most bytes of whole parameters at once.

    `gradients`: the most bytes of a layer's gradients that wait for its others. `expected`: the bytes of whole parameters that
    may be alive. A thread of gloo holds the tensors of a gather until it has woken the thread that waits for it and runs again
    itself; so where more are alive, they are given `MOMENT` seconds to go. What the program holds stays.
    """

    def __init__(self, ranks: int, expected: float, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.expected = expected
        self.ranks, self.gathers, self.sent, self.most, self.largest, self.gradients = ranks, 0, 0.0, 0, 0, 0
        self.alive: list[tuple[StorageWeakRef, int]] = []
        scatter, summed = dist.all_to_all_single, sharded_gradients.scattered

        def all_to_all_single(received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
            self.sent += sent.nbytes * (ranks - 1) / ranks
            return scatter(received, sent, *args, **kwargs)

        def scattered(totals: dict[str, Tensor], *args: Any) -> Any:
            self.gradients = max(self.gradients, sum(total.nbytes for total in totals.values()))
            return summed(totals, *args)

        monkeypatch.setattr(sharded_gradients, "scattered", scattered)
        monkeypatch.setattr(ordered_sums.dist, "all_to_all_single", all_to_all_single)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function is GATHER:
            self.gathers += 1
            self.sent += (self.ranks - 1) * sum(part.nbytes for part in args[0])
            self.largest = max(self.largest, sum(each.nbytes for each in found))
            self.alive += [(StorageWeakRef(each.untyped_storage()), each.nbytes) for each in found]
        self.most = max(self.most, self.bytes_alive())
        return found

    def bytes_alive(self) -> int:
        """The bytes of whole parameters that the program holds."""
        deadline = time.monotonic() + MOMENT
        while True:
            self.alive = [each for each in self.alive if not each[0].expired()]
            found = sum(nbytes for _, nbytes in self.alive)
            if found <= max(self.expected, self.most):
                return found
            if time.monotonic() > deadline:
                self.expected = math.inf  # more than this will not go either
                return found
            time.sleep(0.001)


class Layer(nn.Module):
    """Seven rows: no even number of ranks divides them. A weight that is frozen, one that is only read without gradients."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 29), nn.Linear(29, 7)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.read_alone = nn.Parameter(torch.full((7,), 0.5))
        self.down.weight.requires_grad_(number != 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            shift = self.read_alone * 2
        return x + self.down(torch.relu(self.up(self.norm(x) + shift))) * self.scale


Dtypes = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]  # of parameters, of messages, of sums


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer(number) for number in range(8)))


def pipeline(mesh: Any, dtypes: Dtypes = (None, None, None), keep: int | None = 0, **more: Any) -> graphpp.Pipeline:
    x = torch.zeros(2, 7, dtype=dtypes[0] or torch.float32)
    parallel = graphpp.Parallel(keep=keep, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    given = {"split": ["2", "4", "6"], "schedule": "Interleaved1F1B", "microbatches": 4, **more}
    return graphpp.compile(
        model(), F.mse_loss, example=graphpp.Microbatch((x,), target=x), mesh=mesh, parallel=parallel,
        gradients=graphpp.Gradients(dtype=dtypes[2]), **given,
    )  # fmt: skip


def measured(rank: int, more: dict[str, Any], dtypes: Dtypes) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    pipe = pipeline(mesh, dtypes, **more)
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(rank % 2)).to(dtypes[0] or torch.float32)
    pipe.step(x, target=x)
    pipe.zero_grad()
    assert pipe.plan.sharding is not None and pipe.plan.memory is not None
    foretold, memory = pipe.plan.sharding.ranks[rank // 2], pipe.plan.memory.ranks[rank // 2]
    with pytest.MonkeyPatch.context() as patched, Counted(2, foretold.whole, patched) as counted:
        pipe.step(x, target=x)
    assert (counted.gathers, counted.sent) == (foretold.gathers, foretold.sent)
    assert counted.most == memory.weights == foretold.whole
    assert counted.gradients == memory.gradients
    assert counted.most <= 2 * counted.largest
    again = more.get("schedule") == "ZBVZeroBubble" and "memory" in more  # W computes values of the forward again
    assert (counted.gathers == 4 * 4 * 2) == (not again)  # layers of the rank, microbatches, forward and backward
    with pytest.MonkeyPatch.context() as patched, Counted(2, 2 * counted.largest, patched) as counted:
        pipe.eval(x, target=x)
    assert counted.gathers == 4 * 4
    assert counted.most <= 2 * counted.largest
    if not more:
        most = max(each.peak for each in pipe.plan.memory.ranks)
        pipeline(mesh, memory=graphpp.Memory(cap=most)).step(x, target=x)
        with pytest.raises(graphpp.ScheduleError, match="bytes are alive here"):
            pipeline(mesh, memory=graphpp.Memory(cap=most - 1)).step(x, target=x)
    assert f"single layers are gathered {foretold.gathers:g} times" in str(pipe)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("more", "dtypes"),
    [
        ({"schedule": "ZBVZeroBubble"}, (torch.bfloat16, None, torch.float32)),
        *further(
            ({}, (None, None, None)),
            ({"memory": "full"}, (None, torch.bfloat16, None)),
            ({"schedule": "LoopedBFS", "memory": 0.5}, (None, None, torch.float64)),
            ({"schedule": "DualPipeV"}, (torch.bfloat16, torch.bfloat16, torch.float32)),
            ({"backend": "inductor"}, (None, None, None)),
            ({"backend": "inductor", "schedule": "ZBVZeroBubble", "memory": "full"}, (None, None, None)),
        ),
    ],
)
def test_a_step_sends_and_holds_what_the_plan_says(more: dict[str, Any], dtypes: Dtypes) -> None:
    run_ranks(measured, 4, more, dtypes)


def other_rows_later(rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """The losses and gradients of two steps and an evaluation; in the last two, rank 1 has microbatches of another shape."""
    torch.set_num_threads(1)
    mesh, found = Mesh((2,), ("dp_shard",)).made(), []
    x = torch.randn(8, 7, generator=torch.Generator().manual_seed(rank))
    for keep in (None, 0):
        pipe = pipeline(mesh, keep=keep, split=1, schedule="auto")
        rows = x[4 * rank :]
        losses = [pipe.step(x, target=x).loss, pipe.step(rows, target=rows).loss, pipe.eval(rows, target=rows).loss]
        gradients = {fqn: whole_tensor(each.grad).clone() for fqn, each in pipe.named_parameters() if each.grad is not None}
        found.append((torch.stack(losses), gradients))
    return found


@pytest.mark.exhaustive  # test_calls.py has evaluations of other sizes, and replicas whose shapes differ
def test_data_ranks_may_have_other_shapes_in_a_later_step() -> None:
    for (losses, gradients), (others, theirs) in run_ranks(other_rows_later, 2):
        torch.testing.assert_close(losses, others)
        for fqn, gradient in gradients.items():
            torch.testing.assert_close(theirs[fqn], gradient, rtol=1e-5, atol=1e-6)


class ByShape(nn.Module):
    """A forward that calls its layers in another order for one row."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x)) if x.shape[0] > 1 else self.a(self.b(x))


def refused(rank: int) -> dict[str, str]:
    torch.manual_seed(0)
    mesh, x, found = Mesh((2,), ("dp_shard",)).made(), torch.ones(8 if rank else 4, 4), dict[str, str]()

    def expect(name: str, call: Any) -> None:
        with pytest.raises(graphpp.GraphPPError) as error:
            call()
        found[name] = str(error.value)

    layerwise = graphpp.Parallel(keep=0)
    pipe = graphpp.compile(ByShape(), F.mse_loss, mesh=mesh, microbatches=4, parallel=layerwise)
    expect("other layers", lambda: pipe.step(x, target=x))
    expect("fused", lambda: graphpp.compile(ByShape(), F.mse_loss, mesh=mesh, parallel=layerwise, gradients=FUSED))
    microbatch, model = graphpp.Microbatch((x,), target=x), nn.Linear(4, 4)
    expect("verify", lambda: graphpp.verify(model, F.mse_loss, example=microbatch, mesh=mesh, parallel=layerwise))
    table = graphpp.Schedule.parse("r0 0UNSHARD 0F0 0B0 0RESHARD 0REDUCE_GRAD")
    own = graphpp.compile(model, F.mse_loss, mesh=mesh, parallel=layerwise, schedule=table)
    expect("a table", lambda: own.step(x, target=x))
    return found


FUSED = graphpp.Gradients(fused=True)


def test_refusals_say_what_to_do() -> None:
    for found in run_ranks(refused, 2):
        assert "gather" in found["other layers"] and "or take keep=1" in found["other layers"]
        assert "gradients.fused=True" in found["fused"]
        assert "leave it out" in found["verify"]
        assert "says itself when stages are whole" in found["a table"]


def lacking(rank: int) -> str:
    """The error of a step whose backward hands out all gradients of a layer but one."""
    torch.set_num_threads(1)
    pipe, x = pipeline(Mesh((2,), ("dp_shard",)).made(), split=1, schedule="auto"), torch.ones(8, 7)
    collect = LayerReducer.collect

    def without_one(reducer: LayerReducer, sink: LayerSink, layer: int, fqn: str, gradient: Tensor) -> None:
        if not fqn.endswith("norm.bias"):
            collect(reducer, sink, layer, fqn, gradient)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(RuntimeError) as caught:
        patched.setattr(LayerReducer, "collect", without_one)
        pipe.step(x, target=x)
    return str(caught.value)


def test_a_layer_that_lacks_a_gradient_raises() -> None:
    for said in run_ranks(lacking, 2):
        assert "microbatch 0: the gradients of " in said and "norm.bias, which the backward of the stage has not made" in said
