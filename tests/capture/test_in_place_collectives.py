"""Collectives of `torch.distributed` in a forward: all-reduces are traced, all other calls that communicate are refused."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp._torch.parallel.in_place_collectives import as_functional, communicating_methods
from graphpp.errors import CaptureError
from tests.distributed import run_ranks

ASKS = re.compile("(get|is|init|new|register|set|supports)_.*")  # names that ask about a group or prepare one
LOCAL_METHODS = """
    abort boxed create_default_device create_device memory_stats merge_remote_group name rank setUsePgForSymmMemRendezvous
    shutdown size split_group unbox
"""


def test_every_public_method_of_groups_is_refused_or_known_to_be_local() -> None:
    found = set(communicating_methods())
    for owner in {owner for owner, _ in found} | {dist.ProcessGroup}:
        public = {name for name, value in vars(owner).items() if callable(value) and not isinstance(value, type)}
        rest = {name for name in public if not name.startswith("_") and (owner, name) not in found}
        assert {name for name in rest if not ASKS.fullmatch(name)} <= set(LOCAL_METHODS.split()), owner
    assert {"allreduce", "_allgather_base", "barrier", "send"} <= {name for owner, name in found if owner is dist.ProcessGroup}


class Calling(nn.Module):
    """Hands hidden values to a function."""

    def __init__(self, function: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x).contiguous()
        self.function(y.detach())
        return y


def group() -> dist.ProcessGroup:
    found = dist.group.WORLD
    assert found is not None
    return found


WRITES, LOST = "writes into its arguments and cannot stand in a graph", "cannot stand in a graph: .* Move the call out of"
ALL_REDUCE, FUNCTIONAL = f"{WRITES}. Call torch.distributed.all_reduce", f"{WRITES}. Call the functional collective"
CALLS: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "all_gather": (lambda y: dist.all_gather([y], y), FUNCTIONAL),
    "broadcast": (lambda y: dist.broadcast(y, 0), FUNCTIONAL),
    "ProcessGroup.allreduce_coalesced": (lambda y: group().allreduce_coalesced([y]), ALL_REDUCE),
    "all_reduce": (lambda y: dist.all_reduce(y, async_op=True), ALL_REDUCE),
    "reduce_scatter": (lambda y: dist.reduce_scatter(torch.empty_like(y), [y]), FUNCTIONAL),
    "ProcessGroup.send": (lambda y: group().send([y], 0, 0), LOST),
    "barrier": (lambda y: dist.barrier(), LOST),
    "ProcessGroup.broadcast": (lambda y: group().broadcast(y, 0), FUNCTIONAL),
    "ProcessGroup.barrier": (lambda y: group().barrier(), LOST),
    "Backend.allreduce": (lambda y: group()._get_backend(torch.device("cpu")).allreduce([y]), ALL_REDUCE),
}


def outcomes(rank: int) -> None:
    torch.set_num_threads(1)
    for name, (function, reason) in CALLS.items():
        module = name.split(".")[0]
        if "." not in name and name.isidentifier() and not hasattr(dist, name):
            continue  # an older torch
        shown = name if module in ("ProcessGroup", "Backend") else f"torch.distributed.{name}"
        pipe = graphpp.compile(Calling(function), lambda out: (out * out).mean(), microbatches=2, mesh=group())
        with pytest.raises(CaptureError, match=f"calls {shown} at .*test_in_place_collectives.py.*, which {reason}"):
            pipe.step(torch.ones(4, 4))
    after(rank)


def after(rank: int) -> None:
    """All functions and methods are as before a trace."""
    value = torch.ones(2)
    dist.all_reduce(value)
    group().allreduce([value]).wait()
    dist.barrier()
    dist.all_gather_object([None] * dist.get_world_size(), rank)
    assert value.tolist() == [1.0, 1.0]


def test_calls_that_communicate_are_refused_by_name() -> None:
    run_ranks(outcomes, 1)


class Summing(nn.Module):
    """Adds hidden values up over the ranks, by a function and by a method of the group."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        total = y.detach().clone()
        dist.all_reduce(total)
        other = y.detach().clone()
        group().allreduce([other]).wait()
        return y * total + other


def summed(rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Summing(), torch.ones(4, 4) * (rank + 1)
    total = sum((model.layer(torch.ones(4, 4) * (each + 1)) for each in range(2)), torch.zeros(()))
    expected = (model.layer(x) * total + total).sum() / 2
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp_replicate"))
    found = graphpp.compile(model, lambda out: out.sum(), microbatches=2, mesh=mesh["pp"].get_group()).step(x).losses
    torch.testing.assert_close(found.mean(), expected.detach())


def test_all_reduces_are_traced() -> None:
    run_ranks(summed, 2)


def in_two_threads(rank: int) -> list[Any]:
    """Collectives of a thread while another thread traces, and questions about groups in the thread that traces."""
    found: list[Any] = []
    with as_functional(lambda: "a line"):
        thread = threading.Thread(target=lambda: found.append(after_in_thread()))
        thread.start()
        thread.join()
        found += [dist.get_rank(), group().rank(), group().size(), dist.get_world_size(), dist.get_backend()]
        with pytest.raises(CaptureError, match=r"calls ProcessGroup\.broadcast at a line"):
            group().broadcast(torch.ones(2), 0)
    return found


def after_in_thread() -> list[float]:
    value = torch.ones(2)
    group().allreduce([value]).wait()
    other, received = 1 - dist.get_rank(), torch.empty(2)
    sends = [dist.P2POp(dist.isend, value, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    dist.broadcast(received, 0)
    dist.barrier()
    found: list[float] = received.tolist()
    return found


def test_other_threads_communicate_during_a_trace() -> None:
    assert run_ranks(in_two_threads, 2) == [[[2.0, 2.0], rank, rank, 2, 2, "gloo"] for rank in range(2)]
