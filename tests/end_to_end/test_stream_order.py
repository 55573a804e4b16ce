"""Trainings on a model of CUDA's streams (`tests/device_trace.py`): no memory is reused before its last use.

Contract: each case names the streams that have to work in it. A training that lacks one kind of wait has a race in its trace.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch

import graphpp
from graphpp.options.offload import Offload
from graphpp.runtime.offloader import CudaMover
from graphpp.schedules.generate.read import default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import batch_p2p
from tests.device_trace import COMPUTE, FakeStream, Recorder, recording
from tests.distributed import run_ranks
from tests.movers import moving_by
from tests.rendezvous import Rules, nccl_rules
from tests.sharding import Mesh, train_on_mesh
from tests.special_models import CUTS
from tests.training import CASES, capturing, compiled, step, train

OFFLOAD = graphpp.Memory(offload=Offload(least_bytes=0))
RECOMPUTE = graphpp.Memory(recompute="full")
MOVER, PAIR, GROUP = "side stream 1", "communicator of (0, 1)", "communicator of all"
SHARDS, REPLICAS = Mesh((2,), ("dp_shard",)), Mesh((2,), ("dp_replicate",))


class Found(NamedTuple):
    """The races of a rank, its kernels by stream, and how many values it evicted and prefetched."""

    races: list[str]
    kernels: dict[str, int]
    evicted: int
    prefetched: int

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
        mover = CountingMover(torch.device("cpu"))
        with moving_by(mover):
            fn(rank, *args)
        assert recorder.trace.freed
    return Found(recorder.trace.races, recorder.trace.kernels, mover.evicted, mover.prefetched)


def pipeline(rank: int, schedule: str, model: str, batched: bool, options: Mapping[str, Any]) -> None:
    stages = default_stages(schedule, 2)
    table: Any = schedule
    if batched:
        table = batch_p2p(add_send_recv(make_table(schedule, 2, stages, 4)), ("all",))
    train(rank, model, {"split": CUTS[stages], "microbatches": 4, "schedule": table, **options}, 2)


def evaluation(rank: int) -> None:
    """An evaluation between two steps."""
    with capturing("skip"):
        case = CASES["skip"]()
        pipe = compiled(case, split=CUTS[2], schedule="1F1B", microbatches=4)
        step(pipe, case.batch)
        pipe.eval(*case.batch.args, target=case.batch.target, **case.batch.kwargs)
        step(pipe, case.batch)


def sharded(rank: int, mesh: Mesh, stages: int, schedule: str, keep: int | None) -> None:
    options = {"split": CUTS[stages], "schedule": schedule, "parallel": graphpp.Parallel(keep=keep)}
    train_on_mesh(rank, mesh, options, True, 0.5)


@pytest.mark.parametrize(
    ("working", "fn", "args"),
    [
        ((PAIR, GROUP), pipeline, ("1F1B", "skip", False, {})),
        ((PAIR, GROUP), pipeline, ("ZBVZeroBubble", "skip", False, {})),
        ((PAIR, GROUP, MOVER), pipeline, ("GPipe", "skip", False, {"memory": OFFLOAD})),
        ((GROUP,), pipeline, ("Interleaved1F1B", "skip", True, {"memory": RECOMPUTE})),
        ((PAIR, GROUP), pipeline, ("DualPipeV", "tied", False, {})),
        ((PAIR, GROUP), evaluation, ()),
        ((GROUP,), sharded, (SHARDS, 1, "auto", None)),
        ((GROUP,), sharded, (SHARDS, 2, "LoopedBFS", 1)),
        ((GROUP,), sharded, (SHARDS, 2, "LoopedBFS", 0)),
        ((GROUP,), sharded, (REPLICAS, 2, "LoopedBFS", None)),
    ],
)
def test_a_training(tmp_path: Path, working: tuple[str, ...], fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    for found in run_ranks(traced, 2, 2, tmp_path, fn, *args):
        assert found.races == []
        assert {part for part in (MOVER, PAIR, GROUP) if found.on(part)} == set(working)
        assert found.on(COMPUTE) > found.on(PAIR) + found.on(GROUP)
        assert found.evicted == found.prefetched
        assert found.on(MOVER) == found.evicted + found.prefetched


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


@pytest.mark.parametrize(
    ("target", "name", "text", "race"),
    [
        (Recorder, "join", "receive", rf"read by .*does not wait for receive from \d .*: {COMPUTE} must wait for rank"),
        (Recorder, "join", "send", rf"freed to {COMPUTE}, which does not wait for send to .*: {COMPUTE} must wait for rank"),
        (Recorder, "join", "allgather", rf"read by .*does not wait for .*allgather.*: {COMPUTE} must wait for rank"),
        (FakeStream, "wait_event", "", rf"freed to {COMPUTE}, .* wait for copy_ .*: {COMPUTE} must wait for {MOVER}"),
        (FakeStream, "wait_stream", "", rf"read by copy_ .*: {MOVER} must wait for {COMPUTE}"),
    ],
)
def test_a_training_without_a_kind_of_wait_races(tmp_path: Path, target: type, name: str, text: str, race: str) -> None:
    schedule, options = ("ZBVZeroBubble", {}) if target is Recorder else ("GPipe", {"memory": OFFLOAD})
    args = (target, name, text, pipeline, schedule, "skip", False, options)
    for found in run_ranks(lacking, 2, 2, tmp_path, *args):
        assert any(re.search(rf"^memory \d+ of .* is {race}", each) for each in found.races)
