"""Pipelines on a model of CUDA's streams (`tests/device_trace.py`): no memory is reused before its last use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import graphpp
from graphpp.options.offload import Offload
from graphpp.runtime.offloader import CudaMover
from graphpp.schedules.generate.read import default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import batch_p2p
from tests.device_trace import recording
from tests.distributed import run_ranks
from tests.movers import moving_by
from tests.rendezvous import Rules, nccl_rules
from tests.special_models import CUTS
from tests.training import train

OFFLOAD = graphpp.Memory(offload=Offload(least_bytes=0))
RECOMPUTE = graphpp.Memory(recompute="full")
Found = tuple[list[str], int]  # races, and streams beside the compute stream on which kernels ran


def traced(rank: int, ranks: int, folder: Path, fn: Callable[..., Any], *args: Any) -> Found:
    """The races of a function of a rank, which trains over NCCL's rules and offloads by the mover of a GPU."""
    with nccl_rules(rank, ranks, folder, Rules.LAZY), recording() as recorder, moving_by(CudaMover(torch.device("cpu"))):
        fn(rank, *args)
        assert recorder.trace.freed
    return recorder.trace.races, len(recorder.trace.kernels) - 1


def pipeline(rank: int, schedule: str, model: str, batched: bool, options: Mapping[str, Any]) -> None:
    stages = default_stages(schedule, 2)
    table: Any = schedule
    if batched:
        table = batch_p2p(add_send_recv(make_table(schedule, 2, stages, 4)), ("all",))
    train(rank, model, {"split": CUTS[stages], "microbatches": 4, "schedule": table, **options}, 2)


@pytest.mark.parametrize(
    ("schedule", "model", "batched", "options"),
    [
        ("1F1B", "skip", False, {}),
        ("ZBVZeroBubble", "skip", False, {"memory": OFFLOAD}),
        ("Interleaved1F1B", "skip", True, {"memory": RECOMPUTE}),
        ("DualPipeV", "tied", False, {}),
    ],
)
def test_a_pipeline(tmp_path: Path, schedule: str, model: str, batched: bool, options: Mapping[str, Any]) -> None:
    for races, streams in run_ranks(traced, 2, 2, tmp_path, pipeline, schedule, model, batched, options):
        assert races == []
        assert streams >= 1
