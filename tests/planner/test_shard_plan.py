"""The cost of sharded stages: known numbers of known schedules, and the bytes that a step really sends and holds."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.parallel import ordered_sums
from graphpp.runtime.fsdp import gather_parameters
from graphpp.schedules.check.shard_counts import shard_counts
from graphpp.schedules.generate.read import make_table
from graphpp.schedules.rewrite.place_shards import place_shards
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.saved_graphs import GRAPHS

INTERLEAVED = {group: partial(graphpp.schedules.megatron_interleaved, group=group) for group in (4, 8, 16, 32)}


@pytest.mark.parametrize(
    ("schedule", "per_rank", "microbatches", "keep", "gathers", "reductions"),
    [  # gathers and reductions of a stage: the least and the most of the ranks; 4 ranks
        ("GPipe", 1, 8, 1, (1, 1), (1, 1)),
        ("Interleaved1F1B", 2, 8, 1, (2.5, 9.5), (2, 5)),
        ("Interleaved1F1B", 2, 32, 1, (8.5, 51.5), (8, 29)),
        ("Interleaved1F1B", 4, 8, 2, (2.5, 2.5), (1.75, 1.75)),
        ("Interleaved1F1B", 4, 32, 4, (1, 1), (1, 1)),
        ("LoopedBFS", 2, 8, 1, (1.5, 1.5), (1, 1)),
        ("LoopedBFS", 4, 32, 1, (1.75, 1.75), (1, 1)),
        ("ZBVZeroBubble", 2, 8, 1, (5.5, 12.5), (5, 6)),
        ("DualPipeV", 2, 32, 2, (1, 1), (1, 1)),
        (INTERLEAVED[4], 4, 32, 2, (8.5, 8.5), (7.75, 7.75)),
        (INTERLEAVED[16], 4, 32, 2, (2.5, 2.5), (1.75, 1.75)),
        (INTERLEAVED[32], 4, 32, 1, (1.75, 1.75), (1, 1)),
    ],
)
def test_counts_of_known_schedules(
    schedule: Any, per_rank: int, microbatches: int, keep: int, gathers: Any, reductions: Any
) -> None:
    table = make_table(schedule, 4, 4 * per_rank, microbatches)
    found = shard_counts(place_shards(table, keep))
    assert (min(each.gathers_per_stage for each in found), max(each.gathers_per_stage for each in found)) == gathers
    assert (min(each.reductions_per_stage for each in found), max(each.reductions_per_stage for each in found)) == reductions


class Counted:
    """The bytes that this rank sends along the mesh, by ring, and the most bytes of whole parameters at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
        self.sent, self.whole, self.most = 0.0, 0, 0
        gather, scatter = gather_parameters.all_gather_many, dist.all_to_all_single
        unshard, reshard = gather_parameters.FlatShard.unshard, gather_parameters.FlatShard.reshard

        def all_gather_many(gathered: Any, parts: Any, group: Any) -> Any:
            self.sent += (ranks - 1) * sum(part.nbytes for part in parts)
            return gather(gathered, parts, group)

        def all_to_all_single(received: Any, sent: Any, *args: Any, **kwargs: Any) -> Any:
            self.sent += sent.nbytes * (ranks - 1) / ranks
            return scatter(received, sent, *args, **kwargs)

        def moved(way: Any, sign: int, shard: Any) -> None:
            way(shard)
            self.whole += sign * sum(shard.whole(fqn).nbytes for fqn in shard.layout.regions)
            self.most = max(self.most, self.whole)

        monkeypatch.setattr(gather_parameters, "all_gather_many", all_gather_many)
        monkeypatch.setattr(ordered_sums.dist, "all_to_all_single", all_to_all_single)
        monkeypatch.setattr(gather_parameters.FlatShard, "unshard", lambda shard: moved(unshard, 1, shard))
        monkeypatch.setattr(gather_parameters.FlatShard, "reshard", lambda shard: moved(reshard, -1, shard))


Dtypes = tuple[torch.dtype | None, torch.dtype | None, torch.dtype | None]  # of parameters, of messages, of sums


def measured(rank: int, schedule: str, keep: int | None, dtypes: Dtypes) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    layers[2][0].weight.requires_grad_(False)
    x = torch.randn(16, 8).to(dtypes[0] or torch.float32)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    parallel = graphpp.Parallel(keep=keep, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    pipe = graphpp.compile(
        nn.Sequential(*layers), F.mse_loss, example=graphpp.Microbatch((x[:2],), target=x[:2]), split=["2", "4", "6"],
        schedule=schedule, microbatches=8, mesh=mesh, parallel=parallel, gradients=graphpp.Gradients(dtype=dtypes[2]),
        artifact=GRAPHS,
    )  # fmt: skip
    pipe.step(x, target=x)
    pipe.zero_grad()
    assert pipe.plan.sharding is not None and pipe.plan.memory is not None
    foretold, memory = pipe.plan.sharding.ranks[rank // 2], pipe.plan.memory.ranks[rank // 2]
    with pytest.MonkeyPatch.context() as patched:
        counted = Counted(patched, 2)
        pipe.step(x, target=x)
    assert counted.sent == foretold.sent
    assert counted.most == memory.weights
    width = max(torch.float32, dtypes[2] or torch.float32, key=lambda dtype: dtype.itemsize).itemsize
    assert memory.shards * 2 == sum(p.nbytes + p.numel() * width * p.requires_grad for p in pipe.parameters())
    text = str(pipe)
    assert "parameters sharded over 2 ranks" in text
    assert ("'LoopedBFS' would gather 1.5 times" in text) == (schedule == "Interleaved1F1B" and keep == 1)


@pytest.mark.parametrize(
    ("schedule", "keep", "dtypes"),
    [
        ("LoopedBFS", 1, (torch.bfloat16, None, None)),
        *further(
            ("Interleaved1F1B", None, (None, None, torch.float64)),
            ("Interleaved1F1B", 1, (None, None, torch.float64)),
            ("LoopedBFS", 1, (None, torch.bfloat16, None)),
            ("Interleaved1F1B", 1, (torch.bfloat16, torch.bfloat16, torch.float32)),
            ("Interleaved1F1B", None, (torch.bfloat16, None, torch.float32)),
        ),
    ],
)
def test_a_step_sends_and_holds_what_the_plan_says(schedule: str, keep: int | None, dtypes: Dtypes) -> None:
    run_ranks(measured, 4, schedule, keep, dtypes)
