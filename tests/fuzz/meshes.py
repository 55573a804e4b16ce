"""Random programs on random meshes: the dimensions `pp`, `dp_replicate` and `dp_shard` over 2 to 4 ranks, and one process.

Contract: each replica trains on microbatches of its own for `STEPS` steps, gradients set to None in between, buffers carried
over. `run_on_mesh` returns what one rank has, with whole gradients. `run_alone` runs the same cut in one process, one replica
after the other, and averages the gradients in the order of the replicas. Losses and buffers are bit-equal. Gradients are
bit-equal but where sums are added in another order: those of tied parameters, those of several copies of shards, those of more
than two replicas under `sum_order="any"`, and all where a stage or a layer is reduced more than once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

import graphpp
from graphpp.batch.microbatch import Microbatch
from graphpp.errors import CaptureError
from graphpp.planner.layers import module_calls
from graphpp.runtime.dtensors import whole_tensor
from tests.fuzz.harness import SEED, STEPS, Numbers, captured
from tests.fuzz.programs import Net, Op, Program, programs
from tests.sharding import Mesh

T = TypeVar("T")
ONCE = ("GPipe", "1F1B", "ZB1P")  # one stage a rank
MESHES: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    ((2,), ("pp",)), ((4,), ("pp",)), ((3,), ("dp_shard",)), ((4,), ("dp_shard",)), ((2,), ("dp_replicate",)),
    ((2, 2), ("pp", "dp_shard")), ((2, 2), ("pp", "dp_shard")), ((2, 2), ("dp_shard", "pp")), ((2, 2), ("dp_shard", "pp")),
    ((2, 2), ("dp_replicate", "pp")), ((2, 2), ("pp", "dp_replicate")), ((2, 2), ("dp_replicate", "dp_shard")),
    ((2, 1, 2), ("dp_shard", "dp_replicate", "pp")), ((3,), ("pp",)), ((3,), ("dp_replicate",)),
)  # fmt: skip
SEVERAL = ("Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "V-Half", "DualPipeV")


@dataclass(frozen=True)
class OnMesh:
    """A mesh, and how a program runs there.

    `places`: which calls begin stages, counted modulo what there is; `keep`, `sum_order`: as in `graphpp.Parallel`.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    schedule: str
    per_rank: int
    places: tuple[int, ...]
    microbatches: int
    keep: int | None
    sum_order: Literal["ranks", "any"] = "ranks"

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.sizes, self.names)

    @property
    def stages(self) -> int:
        return self.mesh.size("pp") * self.per_rank

    @property
    def reorders(self) -> bool:
        """Whether sums are added in another order than in a loop over the replicas."""
        copies_of_shards = self.mesh.size("dp_replicate") > 1 and self.mesh.size("dp_shard") > 1
        return self.keep is not None or copies_of_shards or (self.sum_order == "any" and self.mesh.replicas > 2)

    def options(self, split: Sequence[str]) -> dict[str, Any]:
        parallel = graphpp.Parallel(keep=self.keep, sum_order=self.sum_order)
        return {"split": list(split), "schedule": self.schedule, "parallel": parallel}


@dataclass
class Ran:
    """By step what training left behind. `refused`: the message of the error that refused the program, or "".

    `tied`: the parameters to whose gradients several stages add.
    """

    steps: list[Numbers] = field(default_factory=list)
    refused: str = ""
    tied: set[str] = field(default_factory=set)


def starts(program: Program, case: OnMesh) -> list[str] | None:
    """Module calls at which stages begin, none of them the first operation; None where the program has too few."""
    calls = [call for call in module_calls(captured(Net(program))) if re.fullmatch(r"ops\.\d+(@\d+)?", call.fqn)]
    free = sorted({call.position: call.fqn for call in calls if call.position > 0}.items())
    return None if len(free) < case.stages - 1 else [fqn for _, fqn in sorted(chosen(free, case))]


def chosen(free: Sequence[T], case: OnMesh) -> list[T]:
    """As many different items of `free` as the case has boundaries of stages."""
    left = list(free)
    return [left.pop(place % len(left)) for place in case.places[: case.stages - 1]]


def run_on_mesh(rank: int, cases: Sequence[tuple[Program, OnMesh, list[str]]]) -> list[Ran]:
    """What this rank is left with, for each case."""
    torch.set_num_threads(1)
    meshes = {key: Mesh(*key).made() for key in dict.fromkeys((case.sizes, case.names) for _, case, _ in cases)}
    return [_ran(rank, program, case, split, meshes[case.sizes, case.names]) for program, case, split in cases]


def _ran(rank: int, program: Program, case: OnMesh, split: list[str], mesh: Any) -> Ran:
    net = Net(program)
    parts = _of_replica(net, case, case.mesh.replica(rank))
    try:
        pipe = graphpp.compile(
            net, net.loss(), example=parts[0], microbatches=case.microbatches, mesh=mesh, **case.options(split)
        )
        return _steps(pipe, parts)
    except CaptureError as error:
        return Ran(refused=str(error))


def run_alone(program: Program, case: OnMesh, split: list[str]) -> list[Ran]:
    """One process: the numbers of each replica, with the gradients that all of them have."""
    replicas = case.mesh.replicas
    runs = []
    for replica in range(replicas):
        net = Net(program)
        parts = _of_replica(net, case, replica)
        try:
            pipe = graphpp.compile(net, net.loss(), example=parts[0], split=split, microbatches=case.microbatches)
            runs.append(_steps(pipe, parts))
        except CaptureError as error:
            return [Ran(refused=str(error))] * replicas
    for step in zip(*(run.steps for run in runs), strict=True):
        total = {fqn: _mean([numbers.grads[fqn] for numbers in step]) for fqn in step[0].grads}
        for numbers in step:
            numbers.grads = total
    return runs


def _mean(gradients: list[Tensor]) -> Tensor:
    total = gradients[0]
    for each in gradients[1:]:
        total = total + each
    return total / len(gradients) if len(gradients) > 1 else total


def _of_replica(net: Net, case: OnMesh, replica: int) -> list[Microbatch]:
    """The microbatches of a replica."""
    every = net.batch(case.microbatches * case.mesh.replicas)
    return every[replica * case.microbatches :][: case.microbatches]


def _steps(pipe: graphpp.Pipeline, parts: list[Microbatch]) -> Ran:
    torch.manual_seed(SEED)
    made = [fqn for plan in pipe.plan.stages for fqn in pipe.programs(plan.stage).gradients]
    found = Ran(tied={fqn for fqn in made if made.count(fqn) > 1})
    for _ in range(STEPS):
        losses = list(pipe.step_microbatches(parts).losses.unbind())
        grads = {fqn: whole_tensor(each.grad).clone() for fqn, each in pipe.named_parameters() if each.grad is not None}
        buffers = {fqn: buffer.clone() for fqn, buffer in pipe.named_buffers()}
        found.steps.append(Numbers(losses, grads, buffers))
        pipe.zero_grad()
    return found


@st.composite
def cases_on_mesh(draw: st.DrawFn) -> OnMesh:
    """A mesh of 2 to 4 ranks with one to three dimensions, a schedule, for shards a `keep`, for replicas a `sum_order`."""
    sizes, names = draw(st.sampled_from(MESHES))
    mesh = Mesh(sizes, names)
    ranks, sharded = mesh.size("pp"), mesh.size("dp_shard") > 1
    several = ranks <= 2 and (ranks == 1 or draw(st.booleans()))
    per_rank = draw(st.integers(2, 4)) if ranks == 1 else 2 if several else 1
    schedule = draw(st.sampled_from(SEVERAL if several and ranks > 1 else ("LoopedBFS",) if several else ONCE))
    places = tuple(draw(st.lists(st.integers(0, 20), min_size=3, max_size=3)))
    least = 2 if schedule == "DualPipeV" else 1  # an overlap computes with two stages
    keep = draw(st.sampled_from((None, least, 0, 0))) if sharded else None
    sum_order: Literal["ranks", "any"] = draw(st.sampled_from(("ranks", "ranks", "any"))) if mesh.replicas > 1 else "ranks"
    return OnMesh(sizes, names, schedule, per_rank, places, ranks * draw(st.sampled_from((2, 2, 4))), keep, sum_order)


@st.composite
def tied_programs(draw: st.DrawFn) -> Program:
    """A random program whose last layer has a weight of an earlier one, often of the first."""
    drawn = draw(programs())
    last = Op("linear", (0,), "weight", draw(st.integers(0, 5)))
    return replace(drawn, ops=(Op("linear", (0,)), *drawn.ops, last))


def on_meshes() -> st.SearchStrategy[tuple[Program, OnMesh]]:
    return st.tuples(programs() | tied_programs(), cases_on_mesh())

