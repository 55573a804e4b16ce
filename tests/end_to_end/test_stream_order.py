"""Trainings on a model of CUDA's streams (`tests/device_trace.py`): no memory is reused before its last use.

Contract: each case names the streams that have to work in it. A training that lacks one kind of wait has a race in its trace.
Programs of `GRAPHS` are replayed by `tests.cuda_graph_pool.TracedPool`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import starmap
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import graphpp
from graphpp.backends.record_programs import StepGraphs
from graphpp.options.offload import Offload
from graphpp.runtime.messages.mailbox import Message
from graphpp.runtime.offloader import CudaMover
from graphpp.runtime.program import Phase
from graphpp.runtime.task import Task
from graphpp.schedules.generate.read import default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import batch_p2p
from tests import expert_parallel, tensor_parallel
from tests.cuda_graph_pool import TracedPool
from tests.device_trace import COMPUTE, FakeStream, Recorder, recording
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.internals import recording_by
from tests.movers import moving_by
from tests.rendezvous import Rules, nccl_rules
from tests.sharding import Mesh, train_on_mesh
from tests.special_models import CUTS
from tests.test_attention import train as train_with_context
from tests.training import CASES, capturing, compiled, same, step, train

OFFLOAD = graphpp.Memory(offload=Offload(least_bytes=0))
RECOMPUTE = graphpp.Memory(recompute="full")
BOTH = graphpp.Memory(recompute="full", offload=Offload(least_bytes=0))
GRAPHS = graphpp.Eager(cudagraphs=True)
MOVER, RECORDER, PAIR, GROUP = "side stream 1", "side stream 2", "communicator of (", "communicator of all"
SHARDS, REPLICAS = Mesh((2,), ("dp_shard",)), Mesh((2,), ("dp_replicate",))
EXPERTS, TENSORS, CONTEXT = Mesh((2,), ("ep",)), Mesh((2,), ("tp",)), {"pp": 1, "cp": 2}
PIPE_SHARDS, PIPE_EXPERTS = Mesh((2, 2), ("pp", "dp_shard")), Mesh((2, 2), ("pp", "ep"))


class Found(NamedTuple):
    """The races of a rank, its kernels by stream, how many values it evicted and prefetched, and replays of programs."""

    races: list[str]
    kernels: dict[str, int]
    evicted: int
    prefetched: int
    replays: int

    def on(self, part: str) -> int:
        """The kernels of the streams whose names contain a text."""
        return sum(count for stream, count in self.kernels.items() if part in stream)


class CountingMover(CudaMover):
    """Counts what it evicts and prefetches, and holds none of it."""

    evicted = prefetched = 0

    def evict(self, value: torch.Tensor) -> Any:
        self.evicted += 1
        return super().evict(value)

    def prefetch(self, copy: Any) -> None:
        self.prefetched += 1
        super().prefetch(copy)


def traced(rank: int, ranks: int, folder: Path, fn: Callable[..., Any], *args: Any) -> Found:
    """Trace a function of a rank, which trains over NCCL's rules and offloads by the mover of a GPU."""
    with nccl_rules(rank, ranks, folder, Rules.LAZY), recording() as recorder:
        mover, pool = CountingMover(torch.device("cpu")), TracedPool()
        with moving_by(mover), recording_by(pool):
            fn(rank, *args)
        assert recorder.trace.freed
    return Found(recorder.trace.races, recorder.trace.kernels, mover.evicted, mover.prefetched, pool.replays)


def pipeline(rank: int, schedule: str, model: str, batched: bool, options: Mapping[str, Any]) -> None:
    stages = default_stages(schedule, 2)
    table: Any = schedule
    if batched:
        table = batch_p2p(add_send_recv(make_table(schedule, 2, stages, 4)), ("all",))
    steps = 3 if "backend" in options else 2  # of three steps of graphs the third replays
    train(rank, model, {"split": CUTS[stages], "microbatches": 4, "schedule": table, **options}, steps)


def evaluation(rank: int, options: Mapping[str, Any]) -> None:
    """An evaluation between any two of three steps."""
    with capturing("skip"):
        case = CASES["skip"]()
        pipe = compiled(case, split=CUTS[2], microbatches=4, **options)
        for _ in range(2):
            step(pipe, case.batch)
            pipe.eval(*case.batch.args, target=case.batch.target, **case.batch.kwargs)
        step(pipe, case.batch)


def sharded(rank: int, mesh: Mesh, stages: int, schedule: str, keep: int | None) -> None:
    options = {"split": CUTS[stages], "schedule": schedule, "parallel": graphpp.Parallel(keep=keep)}
    train_on_mesh(rank, mesh, options, True, 0.5)


def experts(rank: int, mesh: Mesh, schedule: str) -> None:
    options = {"split": expert_parallel.CUTS[default_stages(schedule, mesh.size("pp"))], "schedule": schedule}
    expert_parallel.train_on_mesh(rank, mesh, options)


def tensors(rank: int, mesh: Mesh, schedule: str) -> None:
    options = {"split": tensor_parallel.CUTS[default_stages(schedule, mesh.size("pp"))], "schedule": schedule}
    tensor_parallel.train_on_mesh(rank, mesh, {}, True, options)


def context(rank: int, shape: dict[str, int], schedule: str) -> None:
    train_with_context(rank, shape, schedule, "ulysses", "eager")


@pytest.mark.first_cases(3)
@pytest.mark.parametrize(
    ("working", "fn", "args"),
    [
        ((PAIR, GROUP), pipeline, ("ZBVZeroBubble", "skip", False, {})),
        ((GROUP, MOVER, RECORDER), pipeline, ("GPipe", "skip", True, {"memory": OFFLOAD, "backend": GRAPHS})),
        ((GROUP,), sharded, (SHARDS, 2, "LoopedBFS", 1)),
        ((PAIR, GROUP, RECORDER), evaluation, ({"schedule": "1F1B", "backend": GRAPHS},)),
        ((PAIR, GROUP, MOVER), pipeline, ("GPipe", "skip", False, {"memory": OFFLOAD})),
        *further(
            ((PAIR, GROUP), pipeline, ("1F1B", "skip", False, {})),
            ((PAIR, GROUP), pipeline, ("DualPipeV", "tied", False, {})),
            ((GROUP,), sharded, (SHARDS, 1, "auto", None)),
            ((GROUP,), sharded, (SHARDS, 2, "LoopedBFS", 0)),
            ((GROUP,), sharded, (REPLICAS, 2, "LoopedBFS", None)),
            ((PAIR, GROUP), sharded, (PIPE_SHARDS, 2, "1F1B", 0)),
            ((PAIR, GROUP), experts, (PIPE_EXPERTS, "DualPipeV")),
            ((GROUP,), tensors, (TENSORS, "GPipe")),
            ((GROUP,), context, (CONTEXT, "GPipe")),
            ((PAIR, GROUP, MOVER, RECORDER), pipeline, ("GPipe", "tied", False, {"memory": BOTH, "backend": GRAPHS})),
            ((PAIR, GROUP), sharded, (PIPE_SHARDS, 4, "ZBVZeroBubble", 1)),
            ((PAIR, GROUP), sharded, (Mesh((2, 2), ("pp", "dp_replicate")), 2, "1F1B", None)),
            ((PAIR, GROUP), tensors, (Mesh((2, 2), ("pp", "tp")), "Interleaved1F1B")),
            ((PAIR, GROUP), context, ({"pp": 2, "cp": 2}, "1F1B")),
        ),
    ],
)
def test_a_training(tmp_path: Path, working: tuple[str, ...], fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    ranks = getattr(args[0], "ranks", 2) if fn is not context else prod(args[0].values())
    for found in run_ranks(traced, ranks, ranks, tmp_path, fn, *args):
        assert found.races == []
        assert {part for part in (MOVER, RECORDER, PAIR, GROUP) if found.on(part)} == set(working)
        assert found.on(COMPUTE) > found.on(PAIR) + found.on(GROUP)
        assert found.evicted == found.prefetched
        assert found.on(MOVER) == found.evicted + found.prefetched
        assert (found.replays > 0) == (RECORDER in working)


def failing_halfway(rank: int, options: Mapping[str, Any]) -> None:
    """Steps of two stages, of which the third one fails in a backward; the fourth has the numbers of the second."""
    arguments, case = Task.arguments, CASES["skip"]()

    def failing(task: Task) -> list[Any]:
        if (task.program.stage, task.key.phase, task.key.microbatch) == (0, Phase.BACKWARD, 1):
            raise RuntimeError("out of luck")
        return arguments(task)

    def gradients() -> list[torch.Tensor | None]:
        case.model.zero_grad()
        step(pipe, case.batch)
        return [parameter.grad for parameter in case.model.parameters()]

    with capturing("skip"):
        pipe = compiled(case, split=CUTS[2], schedule="GPipe", microbatches=4, **options)
        gradients()
        expected = gradients()
        with patch.object(Task, "arguments", failing), pytest.raises(RuntimeError, match="out of luck"):
            gradients()
        assert all(starmap(same, zip(gradients(), expected, strict=True)))


@pytest.mark.parametrize("options", [{"memory": BOTH}, {"memory": OFFLOAD, "backend": GRAPHS}])
def test_a_step_that_fails_and_the_next(tmp_path: Path, options: Mapping[str, Any]) -> None:
    (found,) = run_ranks(traced, 1, 1, tmp_path, failing_halfway, options)
    assert found.races == []
    assert found.on(MOVER) > found.prefetched > 0
    assert (found.replays > 0) == ("backend" in options)


def lacking(rank: int, ranks: int, folder: Path, target: type, name: str, text: str, *args: Any) -> Found:
    """Trace a function in which those waits of a method do nothing whose first argument contains a text."""
    whole, skipped = getattr(target, name), []

    def wait(self: Any, *given: Any) -> None:
        if text in str(given[0]):
            skipped.append(given)
        else:
            whole(self, *given)

    with patch.object(target, name, wait):
        found = traced(rank, ranks, folder, *args)
    assert skipped
    return found


REUSED = r"written in the place of memory .*, which was freed, by .*"


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    ("target", "name", "text", "race"),
    [
        (Recorder, "join", "receive", rf"read by .*does not wait for receive from \d .*: {COMPUTE} must wait for rank"),
        (FakeStream, "wait_event", "", rf"{REUSED}, .* wait for copy_ .*: {COMPUTE} must wait for {MOVER}"),
        (Recorder, "join", "send", rf"{REUSED}, which does not wait for send to .*: .* must wait for rank"),
        *further((Recorder, "join", "allgather", rf"read by .*does not wait for .*allgather.*: {COMPUTE} must wait for rank")),
        (FakeStream, "wait_stream", "", rf"read by copy_ .*: {MOVER} must wait for {COMPUTE}"),
    ],
)
def test_a_training_without_a_kind_of_wait_races(tmp_path: Path, target: type, name: str, text: str, race: str) -> None:
    schedule, options = ("ZBVZeroBubble", {}) if target is Recorder else ("GPipe", {"memory": OFFLOAD})
    trained: tuple[Any, ...] = (pipeline, schedule, "skip", False, options)
    if text == "allgather":
        trained = (sharded, SHARDS, 2, "LoopedBFS", 1)
    ranks = run_ranks(lacking, 2, 2, tmp_path, target, name, text, *trained)
    assert any(re.search(rf"^memory \d+ of .* is {race}", each) for found in ranks for each in found.races)


def without_copies(rank: int, ranks: int, folder: Path, *args: Any) -> Found:
    """As `traced`, but messages are sent from the memory of CUDA graphs; they are faster in the step that records."""
    recorded, run_step = [False], StepGraphs.run_step

    def noting(graphs: StepGraphs, *given: Any) -> None:
        recorded[0] = graphs._recorded
        run_step(graphs, *given)

    with (
        patch.object(StepGraphs, "own", lambda graphs, values: list(values)),
        patch.object(StepGraphs, "run_step", noting),
        patch.object(Message, "done", lambda message: not recorded[0]),
    ):
        return traced(rank, ranks, folder, *args)


def test_messages_from_memory_of_graphs_race(tmp_path: Path) -> None:
    ranks = run_ranks(without_copies, 2, 2, tmp_path, pipeline, "GPipe", "skip", False, {"backend": GRAPHS})
    assert any(re.search("is written by .* does not wait for send to", each) for found in ranks for each in found.races)
