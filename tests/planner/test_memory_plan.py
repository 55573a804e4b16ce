"""The bill of a pipeline against what a step and an optimizer really hold, in one process and on several ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import graphpp
from graphpp.planner.memory_plan import MemoryPlan
from graphpp.runtime.dtensors import local_tensor
from graphpp.runtime.fsdp.gather_parameters import FlatShard
from graphpp.runtime.fsdp.sharded_gradients import ShardedGradients
from graphpp.runtime.gradients.accumulate import Accumulator
from graphpp.schedules.generate.read import default_stages
from graphpp.schedules.rewrite.recompute import with_recompute
from tests.distributed import run_ranks
from tests.exhaustive import further

WIDTH = 32  # rows of 32 x 4 bytes are divided by 2 without padding


class Tied(nn.Module):
    """Five layers, of which the first and the third share their weights; a buffer, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.layers[2].weight = self.layers[0].weight
        self.layers[3].weight.requires_grad_(False)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale


def compiled(**options: Any) -> tuple[graphpp.Pipeline, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, WIDTH)
    options = {"split": ["layers.1", "layers.2", "layers.3"], "schedule": "Interleaved1F1B", "microbatches": 8, **options}
    return graphpp.compile(Tied(), F.mse_loss, example=graphpp.Microbatch((x[:2],), target=x[:2]), **options), x


def bill(pipe: graphpp.Pipeline) -> MemoryPlan:
    assert pipe.plan.memory is not None
    return pipe.plan.memory


MATRIX, VECTOR = WIDTH * WIDTH * 4, WIDTH * 4


class Held:
    """The most bytes at once of the sums of gradients of all stages, and of the memory of whole parameters."""

    def __init__(self) -> None:
        self.sums = self.weights = 0
        self.accumulators: dict[int, Accumulator] = {}
        self.shards: dict[int, FlatShard] = {}

    def note(self) -> None:
        sums = (total.nbytes for each in self.accumulators.values() for total in each.sums.values())
        self.sums = max(self.sums, sum(sums))
        whole = (each._memory.storage.nbytes() for each in self.shards.values() if "_memory" in vars(each))
        self.weights = max(self.weights, sum(whole))


@contextmanager
def watching() -> Iterator[Held]:
    held = Held()
    add, unshard, reduce = Accumulator._add_now, FlatShard.unshard, ShardedGradients.reduce

    def added(accumulator: Accumulator, fqn: str, gradient: Tensor) -> None:
        held.accumulators[id(accumulator)] = accumulator
        add(accumulator, fqn, gradient)
        held.note()

    def unsharded(flat: FlatShard) -> None:
        held.shards[id(flat)] = flat
        unshard(flat)
        held.note()

    def reduced(gradients: ShardedGradients, stage: int, whole: bool = False) -> None:
        held.note()
        reduce(gradients, stage, whole)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Accumulator, "_add_now", added)
        patched.setattr(FlatShard, "unshard", unsharded)
        patched.setattr(ShardedGradients, "reduce", reduced)
        yield held


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes that an optimizer keeps for elements, without its numbers of steps."""
    kept = (item for state in optimizer.state.values() for item in state.items())
    return sum(local_tensor(value).nbytes for key, value in kept if key != "step" and value is not None)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_one_process_holds_what_the_plan_says(dtype: torch.dtype | None) -> None:
    pipe, x = compiled(gradients=graphpp.Gradients(dtype=dtype))
    with watching() as held:
        pipe.step(x, target=x)
    (own,) = bill(pipe).ranks
    wider = 1 if dtype is None else 2
    assert own.weights == sum(parameter.nbytes for parameter in pipe.parameters()) == 4 * MATRIX + 5 * VECTOR
    assert own.gradients == held.sums == (4 * MATRIX + 5 * VECTOR) * wider  # the tied weight has a sum in two stages
    assert (own.buffers, own.shards, own.messages) == (VECTOR, 0, 0)
    finish = MATRIX * wider + (0 if dtype is None else 3 * MATRIX + 5 * VECTOR)  # a tied total, and `param.grad` in float32
    assert own.peak == own.state + max(own.activations, finish)


@pytest.mark.parametrize(
    ("said", "make"),
    [
        ("adamw", torch.optim.AdamW),
        ("adam", torch.optim.Adam),
        ("momentum", lambda parameters: torch.optim.SGD(parameters, momentum=0.9)),
        ("sgd", torch.optim.SGD),
    ],
)
def test_optimizers_keep_what_their_names_say(said: str, make: Any) -> None:
    pipe, x = compiled(memory=graphpp.Memory(optimizer=said))
    optimizer = make(pipe.parameters())
    pipe.step(x, target=x)
    optimizer.step()
    assert bill(pipe).ranks[0].optimizer == state_bytes(optimizer)
    assert f"memory.optimizer='{said}'" in str(pipe)


def test_a_cap_counts_everything_and_leaves_room_for_activations() -> None:
    pipe, x = compiled()
    (own,) = bill(pipe).ranks
    assert bill(pipe).room(own.peak) == (own.activations,)
    compiled(memory=graphpp.Memory(cap=own.peak))[0].step(x, target=x)
    with pytest.raises(graphpp.ScheduleError, match=rf"{own.optimizer:,} of optimizer, .* the cap of {own.peak - 1:,}"):
        compiled(memory=graphpp.Memory(cap=own.peak - 1))[0].step(x, target=x)
    compiled(memory=graphpp.Memory(cap=own.peak - own.optimizer, optimizer="sgd"))[0].step(x, target=x)
    with pytest.raises(graphpp.ScheduleError, match=r"cap: rank 0 has .* leaves none for activations"):
        bill(pipe).room(own.state)
    with pytest.raises(graphpp.ScheduleError, match="cap: take one number of bytes, or one for each of 1 ranks"):
        bill(pipe).room([1, 2])
    with pytest.raises(graphpp.ScheduleError, match="cap: take bytes, or a sequence with the bytes of each rank, got 'much'"):
        bill(pipe).room("much")  # type: ignore[arg-type]


def test_casts_of_weights_are_counted_and_evaluation_has_no_bill() -> None:
    def loss(y: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(y.float(), target)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.layer(x)

    x = torch.randn(4, WIDTH)
    pipe = graphpp.compile(Cast(), loss, microbatches=2)
    pipe.step(x, target=x)
    assert bill(pipe).ranks[0].weights == MATRIX + MATRIX // 2
    evaluated = graphpp.compile(Cast(), loss, microbatches=2)
    evaluated.eval(x)
    assert evaluated.plan.memory is None


def measured(rank: int, schedule: str, keep: int | None) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    parallel = graphpp.Parallel(keep=keep)
    pipe, x = compiled(mesh=mesh, parallel=parallel, schedule=schedule)
    own, others = bill(pipe).ranks[rank // 2], bill(pipe).ranks
    optimizer = torch.optim.AdamW(pipe.parameters())
    pipe.step(x, target=x)
    optimizer.step()
    optimizer.zero_grad()
    with watching() as held:
        pipe.step(x, target=x)
    assert own.weights == held.weights
    assert own.gradients == held.sums
    assert own.optimizer == state_bytes(optimizer)
    rows = [(local_tensor(each), local_tensor(each.grad).nbytes if each.grad is not None else 0) for each in pipe.parameters()]
    tied = MATRIX // 2 if rank < 2 else 0  # rows of the sums of stages 0 and 2 are added at the end
    assert own.shards == sum(values.nbytes + grad for values, grad in rows) + tied
    most = max(each.peak for each in others)
    compiled(mesh=mesh, parallel=parallel, schedule=schedule, memory=graphpp.Memory(cap=most))[0].step(x, target=x)
    with pytest.raises(graphpp.ScheduleError, match=r"bytes are alive here .* of shards"):
        compiled(mesh=mesh, parallel=parallel, schedule=schedule, memory=graphpp.Memory(cap=most - 1))[0].step(x, target=x)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("schedule", "keep"), [("LoopedBFS", 1), *further(("Interleaved1F1B", None), ("Interleaved1F1B", 1))])
def test_ranks_with_shards_hold_what_the_plan_says(schedule: str, keep: int | None) -> None:
    run_ranks(measured, 4, schedule, keep)


class Census(TorchDispatchMode):
    """The births and deaths of the storages that operators make, in order: (storage, bytes more or less)."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[int, int]] = []
        self.living: dict[int, int] = {}  # id of the storage -> its number

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {id(value.untyped_storage()) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for storage in (value.untyped_storage() for value in tree_leaves(result) if isinstance(value, Tensor)):
            if id(storage) not in given and id(storage) not in self.living:
                number, self.living[id(storage)] = len(self.events), len(self.events)
                self.events.append((number, storage.nbytes()))
                weakref.finalize(storage, self._leave, id(storage), number, storage.nbytes())
        return result

    def _leave(self, name: int, number: int, nbytes: int) -> None:
        del self.living[name]
        self.events.append((number, -nbytes))

    def peak(self) -> int:
        """The most bytes at once."""
        return max(accumulate(nbytes for _, nbytes in self.events))


def counted(rank: int, ranks: int, schedules: list[Any], replicas: int = 1, rows: int = 512, memory: Any = None) -> None:
    """Activations and messages are all that a step makes which adds to gradients; losses and seeds take some bytes."""
    torch.manual_seed(0)
    x = torch.randn(rows, WIDTH)
    mesh = init_device_mesh("cpu", (ranks, replicas), mesh_dim_names=("pp", "dp_replicate")) if replicas > 1 else None
    for schedule in schedules:
        layers = [nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.Tanh(), nn.Linear(3 * WIDTH, WIDTH)) for _ in range(4)]
        stages = default_stages(schedule, ranks)
        split = [str(at * 4 // stages) for at in range(1, stages)]
        pipe = graphpp.compile(
            nn.Sequential(*layers), F.mse_loss, split=split, schedule=schedule, microbatches=8, mesh=mesh, memory=memory
        )
        pipe.step(x, target=x)
        with Census() as census:
            pipe.step(x, target=x)
        own, found = bill(pipe).ranks[rank // replicas], census.peak()
        foretold = own.peak - (own.weights + own.gradients + own.optimizer + own.buffers)
        assert (own.messages > 0) == (ranks > 1)
        added = 2 * -(-own.gradients // replicas) if replicas > 2 else 0  # its part of a bundle's sum, padded
        assert 0 <= found - foretold <= 100 + added, (schedule, found, foretold)


def ahead(ranks: int, stages: int, microbatches: int) -> graphpp.Schedule:
    """1F1B with Rs in its waits."""
    costs, table = graphpp.Costs.unit(stages, ranks, recompute=True), graphpp.schedules.one_f_one_b(ranks, stages, microbatches)
    return graphpp.schedules.recompute_ahead(table, costs)


def all_ahead(ranks: int, stages: int, microbatches: int) -> graphpp.Schedule:
    """ZB1P with an R before every backward."""
    pairs = frozenset(product(range(stages), range(microbatches)))
    return with_recompute(graphpp.schedules.zb1p(ranks, stages, microbatches), pairs)


def test_a_step_that_recomputes_makes_the_bytes_of_the_plan() -> None:
    run_ranks(counted, 2, 2, ["1F1B", ahead, all_ahead], 1, 512, "full")


def test_a_step_makes_the_bytes_of_the_plan() -> None:
    run_ranks(counted, 2, 2, ["1F1B", "ZB1P", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B"])
