"""graphpp's own process groups: those that overlap, and beside messages of the caller's threads on the caller's groups."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp._torch.distributed import open_groups
from graphpp.parallel import groups
from graphpp.parallel.groups import group_among
from tests.distributed import run_ranks
from tests.other_thread import elsewhere


def overlapping_groups(rank: int) -> list[float]:
    """Each rank's sums over the groups of which it is a member; ranks 0 and 2 are in two groups before the third."""
    assert dist.group.WORLD is not None
    sums = []
    for ranks in ((0, 1), (0, 2), (2, 3), (0, 1, 2, 3), (0, 1)):
        if rank in ranks:
            total = torch.tensor(float(rank))
            dist.all_reduce(total, group=group_among(ranks, dist.group.WORLD))
            sums.append(total.item())
    return sums


def test_groups_of_some_ranks_may_overlap() -> None:
    assert run_ranks(overlapping_groups, 4) == [[1, 2, 6, 1], [1, 6, 1], [2, 5, 6], [5, 6]]


def late_rank(rank: int) -> float:
    """Rank 0 makes the group of both three seconds later than rank 1, which probes its connections meanwhile."""
    assert dist.group.WORLD is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_BETWEEN_PROBES", timedelta(milliseconds=50))
        time.sleep(3 * (1 - rank))
        total = torch.tensor(1.0)
        dist.all_reduce(total, group=group_among((0, 1), dist.group.WORLD))
    return total.item()


def test_a_rank_that_comes_late_is_not_lost() -> None:
    assert run_ranks(late_rank, 2) == [2, 2]


class TiedTwice(nn.Module):
    """Weights that ranks 0 and 1, 1 and 3, 0 and 2, 2 and 3 share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(8))
        for one, other in ((2, 0), (6, 3), (5, 1), (7, 4)):
            self.layers[one].weight = self.layers[other].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


X, Y = torch.linspace(-1, 1, 64).view(8, 8), torch.arange(8)


def step(rank: int) -> tuple[float, dict[str, Tensor]]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    split = [f"layers.{at}" for at in (2, 4, 6)]
    pipe = graphpp.compile(TiedTwice(), F.cross_entropy, split=split, schedule="1F1B", microbatches=4)
    loss = pipe.step(X, target=Y).loss.item()
    return loss, {name: parameter.grad for name, parameter in pipe.named_parameters()}


def test_parameters_that_overlapping_ranks_share_train() -> None:
    loss, gradients = step(0)
    for other, own in run_ranks(step, 4):
        assert other == loss
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, gradients[name])


@contextmanager
def speaking(*groups: dist.ProcessGroup | None) -> Iterator[list[float]]:
    """A thread of the caller's that adds over each group, again and again: the sums, filled when the context ends."""
    totals, ended = list[float](), threading.Event()

    def speak() -> None:
        going = torch.ones(())
        while float(going):  # both ranks stop after the same sum
            going = torch.tensor(float(not ended.is_set()))
            for group in groups:
                total = torch.ones(())
                dist.all_reduce(total, group=group)
                totals.append(float(total))
            dist.all_reduce(going, dist.ReduceOp.MIN, group=groups[0])

    thread = threading.Thread(target=speak)
    thread.start()
    try:
        yield totals
    finally:
        ended.set()
        thread.join()


def beside_a_thread(rank: int, sizes: tuple[int, int] | None) -> tuple[list[float], set[float], set[str], list[str]]:
    """The losses of two pipelines, the sums of a thread that speaks on the caller's groups, the names of new groups, and the
    errors of threads that evaluate while the second pipeline steps, with this pipeline and with the first one.
    """
    refused = list[str]()

    def evaluate(_: Tensor) -> None:
        for each in pipes:
            with pytest.raises(graphpp.GraphPPError) as caught:
                elsewhere(lambda each=each: each.eval(X, target=Y))
            refused.append(str(caught.value))

    torch.set_num_threads(1)
    mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=("pp", "dp_shard"))
    groups, before = mesh.get_all_groups() if mesh is not None else [dist.group.WORLD], set(open_groups())
    losses, pipes = list[float](), list[graphpp.Pipeline]()
    with speaking(*groups) as totals:
        for _ in range(2):
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
            split, schedule = (["2"], "1F1B") if sizes is None else (None, "auto")
            pipe = graphpp.compile(model, F.cross_entropy, mesh=mesh, split=split, schedule=schedule, microbatches=2)
            losses += [float(pipe.step(X, target=Y).loss) for _ in range(2)]
            pipe.clip_grad_norm_(1.0)
            pipe.gather(["0.weight"])
            pipes.append(pipe)
        hook = next(iter(pipe.parameters())).register_post_accumulate_grad_hook(evaluate)
        losses.append(float(pipe.step(X, target=Y).loss))
        hook.remove()
        losses += [float(each.step(X, target=Y).loss) for each in pipes]
    return losses, set(totals), set(open_groups()) - before, refused


def test_a_thread_may_speak_on_the_callers_groups() -> None:
    for losses, totals, made, refused in run_ranks(beside_a_thread, 2, None):
        assert len(losses) == 7 and len(set(losses)) == 1 and totals == {2.0}
        assert len(refused) == 2 and all("another thread is in a call of this pipeline" in each for each in refused)
        assert made == {"graphpp 0 0_1"}  # one for both pipelines
    for losses, totals, *_ in run_ranks(beside_a_thread, 2, (1, 2)):
        assert len(set(losses)) == 1 and totals == {1.0, 2.0}
