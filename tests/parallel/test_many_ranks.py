"""Hundreds of ranks start without a process group of all of them: reads of the store, connections, errors on every rank.

The ranks are threads, joined by torch's process groups of threads. The making of a group exchanges addresses over the store as
gloo does: a rank writes its own, then waits for that of each rank of the group and reads it. The store counts its calls.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from math import log2, sqrt
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

import graphpp
from graphpp import api
from graphpp.errors import MismatchError, RankFailure
from graphpp.parallel import groups, late_rank, lost_rank, rank_tree
from graphpp.parallel.agreement import Agreement, Round
from graphpp.parallel.facts import Facts
from graphpp.parallel.lost_rank import FailureBoard
from graphpp.parallel.place import place_of
from graphpp.parallel.rank_place import RankPlace
from graphpp.parallel.rank_tree import ROW, RankTree
from tests.distributed import DEVICE, WorkerDied, rank_outcomes, run_ranks

CPU = torch.device("cpu")


class CountingStore:
    """A connection to a store in this process; `calls` counts all calls by name and rank."""

    def __init__(self) -> None:
        self.store, self.calls = dist.HashStore(), Counter[tuple[str, int]]()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        self.calls[name, dist.get_rank()] += 1
        found: Callable[..., Any] = getattr(self.store, name)
        return found

    def reads(self, rank: int | None = None) -> int:
        return sum(count for (name, by), count in self.calls.items() if name != "set" and rank in (None, by))


class FakeRanks:
    """A job of threads. `peers`: for each rank, the number of other ranks in each group that it has made."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.store = ranks, CountingStore()
        self.peers = [list[int]() for _ in range(ranks)]
        self._started = threading.Barrier(ranks)

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The result of `work(rank)` on each rank, or its error."""

        def one(rank: int) -> Any:
            dist.init_process_group("threaded", rank=rank, world_size=self.ranks, store=self.store.store)
            self._started.wait()
            try:
                return work(rank)
            except Exception as error:
                return error

        with self._patched(), ThreadPoolExecutor(self.ranks) as pool:
            return list(pool.map(one, range(self.ranks)))

    @contextmanager
    def _patched(self) -> Iterator[None]:
        make = groups.group_of

        def group_of(name: str, ranks: Sequence[int], backend: str, timeout: Any, store: Any) -> dist.ProcessGroup:
            store.set(f"{name}/address/{dist.get_rank()}", "")
            for rank in ranks:
                store.wait([f"{name}/address/{rank}"])
                store.get(f"{name}/address/{rank}")
            self.peers[dist.get_rank()].append(len(ranks) - 1)
            return make(name, ranks, "threaded", timeout, self.store.store)

        multi_threaded_pg._install_threaded_pg()
        _set_thread_isolation_mode(True)
        try:
            with (
                patch.object(groups, "group_of", group_of),
                patch.object(groups, "default_store", lambda: self.store),
                patch.object(groups, "own_connection", lambda store: store),
                patch.object(lost_rank, "default_store", lambda: self.store),
                patch.object(late_rank, "start", lambda: None),
            ):
                yield
        finally:
            _set_thread_isolation_mode(False)
            multi_threaded_pg._uninstall_threaded_pg()


def mesh_of(sizes: dict[str, int], rank: int) -> DeviceMesh:
    ranks = torch.arange(torch.Size(sizes.values()).numel()).view(*sizes.values())
    return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(sizes), _init_backend=False, _rank=rank)


def placed(sizes: dict[str, int], rank: int) -> RankPlace:
    return place_of(nn.Linear(1, 1), mesh_of(sizes, rank), CPU)


SQUARE = {64: {"pp": 8, "dp_replicate": 8}, 256: {"pp": 16, "dp_replicate": 16}}


@pytest.mark.parametrize("ranks", [64, 256])
def test_reads_of_the_store_and_connections_of_the_start(ranks: int) -> None:
    """Of a tree, and of a start on a square mesh, whose dimensions have groups too: O(n) and O(n log n) reads."""
    tree, start = FakeRanks(ranks), FakeRanks(ranks)
    tree.run(lambda rank: RankTree.made(range(ranks), dist.group.WORLD))
    assert tree.store.reads() <= 40 * ranks and max(map(sum, tree.peers)) <= 2 * (ROW - 1)
    places = start.run(lambda rank: placed(SQUARE[ranks], rank))
    assert all(isinstance(place, RankPlace) for place in places), places
    assert start.store.reads() <= 14 * ranks * log2(ranks) and max(map(start.store.reads, range(ranks))) <= 100
    assert max(map(sum, start.peers)) <= 4 * sqrt(ranks)
    assert max(max(each) for each in start.peers) < ranks / 3  # nobody is connected to all


@pytest.mark.parametrize("ranks", [2, 17, 40, 257], ids=["a row", "a rank alone in its row", "a short row", "three levels"])
def test_collectives_of_a_tree(ranks: int) -> None:
    def work(rank: int) -> tuple[list[int], list[int], list[bytes], bool, bool]:
        agreement = Agreement(RankTree.made(range(ranks), dist.group.WORLD), CPU)
        everyone = agreement.of_all(torch.tensor([rank, -rank])).flatten().tolist()
        sent = [agreement._broadcast(b"%d" % rank, source) for source in (0, ranks // 2, ranks - 1)]
        same = agreement.same(b""), agreement.same(b"%d" % (rank == ranks - 1))
        return agreement.largest([rank, -rank, -abs(rank - ranks // 2)]), everyone, sent, *same

    every = [number for rank in range(ranks) for number in (rank, -rank)]
    sent = [b"%d" % source for source in (0, ranks // 2, ranks - 1)]
    assert FakeRanks(ranks).run(work) == [([ranks - 1, 0, 0], every, sent, True, False)] * ranks


ODD = 37
NAMED = f"rank {ODD} (pp 4, dp_replicate 5)"


def test_a_difference_on_one_rank_of_64_reaches_all() -> None:
    def work(rank: int) -> None:
        place = placed(SQUARE[64], rank)
        with Round(place.agreement(place.everyone)) as r:
            r.compare(Facts({"split=": ["3" if rank == ODD else "2"]}))

    for error in FakeRanks(64).run(work):
        assert isinstance(error, MismatchError) and f"{NAMED} differs in split=: it has 3, the others have 2" in str(error)


def test_a_failure_on_one_rank_of_64_reaches_all() -> None:
    def work(rank: int) -> None:
        place = placed(SQUARE[64], rank)
        with Round(place.agreement(place.everyone)):
            if rank == ODD:
                raise ValueError("this rank cannot")

    for rank, error in enumerate(FakeRanks(64).run(work)):
        own, text = ValueError, "this rank cannot"
        expected = (own, text) if rank == ODD else (MismatchError, f"{NAMED}: ValueError: {text}")
        assert isinstance(error, expected[0]) and expected[1] in str(error)


@pytest.mark.parametrize(("reason", "fate"), [("Connection closed", "is lost"), ("Timed out", "did not answer in time")])
def test_a_lost_or_stopped_rank_is_named_in_rows_without_it(reason: str, fate: str) -> None:
    """A lost rank is noticed in its row, whose ranks then end; for a stopped one a rank of another row may look first."""
    told = threading.Event()
    first = ODD // ROW * ROW if reason != "Timed out" else 0

    def work(rank: int) -> None:
        place = placed(SQUARE[64], rank)
        with FailureBoard((place.everyone,), "compile", place.described).watching():
            if rank != first:
                told.wait(60)
            if rank != ODD:
                raise RuntimeError(reason)

    def reaches(group: dist.ProcessGroup, peer: int) -> bool:
        return fate != "is lost" or dist.get_global_rank(group, peer) != ODD

    def ask(ranks: Sequence[int]) -> dict[int, late_rank.Answer | None]:
        answer = late_rank.Answer("graphpp/lost/compile/1/", (), "a line")
        return {rank: None if rank == ODD else answer for rank in ranks}

    publish = FailureBoard._publish

    def published(board: FailureBoard, finding: Any) -> Any:
        found = publish(board, finding)
        told.set()
        return found

    with (
        patch.object(lost_rank, "has_gloo", lambda group: True),
        patch.object(lost_rank, "reaches", reaches),
        patch.object(late_rank, "ask", ask),
        patch.object(FailureBoard, "_publish", published),
    ):
        errors = FakeRanks(64).run(work)
    for error in errors[:ODD] + errors[ODD + 1 :]:
        assert isinstance(error, RankFailure) and str(error).startswith(f"{NAMED} {fate}"), error


def test_many_ranks_of_gpus_agree_in_rows_over_gloo() -> None:
    """A group of more than 64 ranks has NCCL alone; its ranks agree in rows."""
    for like in ("nccl", "cpu:gloo,cuda:nccl"):
        assert [groups._backend(ranks, like) for ranks in (8, 64, 65)] == ["cpu:gloo,cuda:nccl"] * 2 + ["nccl"]
    assert [groups._backend(ranks, "gloo") for ranks in (8, 65)] == ["gloo"] * 2

    def work(rank: int) -> tuple[list[int], int]:
        assert dist.group.WORLD is not None
        tree = RankTree.over(groups.own_group(range(40), dist.group.WORLD))
        return tree.largest([rank], CPU), len(tree.rows)

    with patch.object(rank_tree.dist, "get_backend", lambda group: "nccl" if dist.get_world_size(group) == 40 else "gloo"):
        assert FakeRanks(40).run(work) == [([39], 2 if rank % ROW == 0 else 1) for rank in range(40)]


def dies_in_compile(rank: int) -> str:
    """The error of `compile` on four ranks in rows of two, of which the last one dies once all rows are made."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_replicate"))
    with patch.object(rank_tree, "ROW", 2), patch.object(api, "check_meshes", lambda *_: rank == 3 and os.kill(os.getpid(), 9)):
        try:
            graphpp.compile(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), nn.functional.mse_loss, mesh=mesh)
        except RankFailure as error:
            return str(error)
    return "no error"


def test_a_rank_that_dies_is_named_by_the_ranks_of_other_rows() -> None:
    *outcomes, died = rank_outcomes(dies_in_compile, 4)
    assert isinstance(died.error, WorkerDied)
    for outcome in outcomes:
        assert outcome.value.startswith("rank 3 (pp 1, dp_replicate 1) is lost"), outcome


def trains(rank: int, most: int, row: int) -> list[float]:
    """The losses of three steps with dropout over four stages, in groups of gloo of at most `most` ranks."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mesh = init_device_mesh(DEVICE.type, (2, 2), mesh_dim_names=("pp", "tp"))
    with patch.object(groups, "MOST", most), patch.object(rank_tree, "ROW", row):
        model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to(DEVICE)
        pipe = graphpp.compile(model, nn.functional.mse_loss, split=["2"], microbatches=2, mesh=mesh)
        x = torch.randn(8, 8).to(DEVICE)
        return [float(pipe.step(x, target=x).loss) for _ in range(3)] + [float(pipe.clip_grad_norm_(1.0))]


@pytest.mark.nccl
def test_training_has_the_same_numbers_in_rows() -> None:
    """On GPUs the group of all four ranks has NCCL alone if gloo may connect two."""
    assert run_ranks(trains, 4, 2, 2) == run_ranks(trains, 4, 64, 16)
