"""Under NCCL's rules of order (`tests/rendezvous.py`) no pipeline hangs, and its numbers have the bits of those over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graphpp
from graphpp.runtime.messages import mailbox
from graphpp.schedules.generate.read import default_stages, make_table
from graphpp.schedules.rewrite.add_send_recv import add_send_recv
from graphpp.schedules.rewrite.batch_p2p import batch_p2p
from tests import expert_parallel, sharding, tensor_parallel
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.rendezvous import Rules, nccl_rules
from tests.sharding import Mesh
from tests.special_models import CUTS
from tests.test_attention import train as train_with_context
from tests.training import CASES, capturing, compiled, local_grads, step, train, unequal

# -------------------------------------------------------------------------------------------------------- the rules


def under(rank: int, ranks: int, folder: Path, rules: Rules, fn: Callable[..., Any], *args: Any) -> Any:
    """The value of a function of a rank, under the rules."""
    with nccl_rules(rank, ranks, folder, rules):
        return fn(rank, *args)


def hanging(rank: int, ranks: int, folder: Path, rules: Rules, fn: Callable[..., Any], *args: Any, seconds: float) -> None:
    """Run a function that hangs under the rules; ranks raise after `seconds`."""
    with nccl_rules(rank, ranks, folder, rules, seconds):
        fn(rank, *args)


def check_hang(folder: Path, rules: Rules, fn: Callable[..., Any], *args: Any, seconds: float = 3.0) -> None:
    with pytest.raises(RuntimeError, match=r"waits in (send to|receive from|allreduce)"):
        run_ranks(partial(hanging, seconds=seconds), 2, 2, folder, rules, fn, *args)


def in_turn(rank: int, orders: str) -> list[float]:
    """Send to the other of two ranks (s), receive from it (r) in the order for this rank, then wait for both."""
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    calls = {"s": lambda: dist.isend(sent, 1 - rank), "r": lambda: dist.irecv(received, 1 - rank)}
    works = [calls[each]() for each in orders.split()[rank]]
    for work in works:
        assert work is not None
        work.wait()
    return received.tolist()


def after_a_word(rank: int, folder: Path, patience: float) -> float:
    """A message that one rank sends when it knows, from a file, that the other one has called the receive."""
    value, word = torch.full((1,), float(rank)), folder / "word"
    in_turn(rank, "sr rs")  # makes the communicator
    if rank == 0:
        work = dist.irecv(value, 1)
        word.touch()
    else:
        deadline = time.monotonic() + patience
        while not word.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        work = dist.isend(value, 0) if word.exists() else None
    if work is not None:
        work.wait()
    return value.item()


def in_a_batch(rank: int) -> list[float]:
    sent, received = torch.full((3,), float(rank)), torch.zeros(3)
    ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    (work,) = dist.batch_isend_irecv(ops)
    work.wait()
    return received.tolist()


def of_other_sizes(rank: int) -> None:
    dist.all_reduce(torch.zeros(2 + rank))


def changed_too_early(rank: int) -> float:
    """A message whose memory is written again before it is known to be sent."""
    value = torch.zeros(1)
    work = dist.isend(value, 1) if rank == 0 else dist.irecv(value, 0)
    assert work is not None
    value.add_(1 - rank)
    work.wait()
    return value.item()


def beside_a_collective(rank: int) -> float:
    """A message and a sum twice; the second time, rank 1 calls the sum first."""
    value, total = torch.ones(1), torch.ones(1)
    message: Callable[[], Any] = lambda: dist.isend(value, 1) if rank == 0 else dist.irecv(value, 0)  # noqa: E731
    calls = [message, lambda: dist.all_reduce(total, async_op=True)]
    for order in (calls, calls if rank == 0 else reversed(calls)):  # the first time both ranks make the communicators
        for work in [call() for call in order]:
            work.wait()
    return total.item()


@pytest.mark.parametrize("rules", Rules)
def test_messages_in_one_order_arrive(tmp_path: Path, rules: Rules) -> None:
    assert run_ranks(under, 2, 2, tmp_path, rules, in_turn, "sr rs") == [[1.0] * 3, [0.0] * 3]


def test_a_batch_is_one_operation(tmp_path: Path) -> None:
    assert run_ranks(under, 2, 2, tmp_path, Rules.LAZY, in_a_batch) == [[1.0] * 3, [0.0] * 3]


def test_a_single_message_is_apart_from_collectives_unless_the_group_was_made_eagerly(tmp_path: Path) -> None:
    (tmp_path / "lazy").mkdir()
    assert run_ranks(under, 2, 2, tmp_path / "lazy", Rules.LAZY, beside_a_collective) == [4.0, 4.0]
    check_hang(tmp_path, Rules.EAGER, beside_a_collective)


def test_a_host_that_waits_for_each_operation_tells_nobody(tmp_path: Path) -> None:
    assert run_ranks(under, 2, 2, tmp_path, Rules.SERIAL, after_a_word, tmp_path, 30.0) == [1.0, 1.0]
    (tmp_path / "blocking").mkdir()
    check_hang(tmp_path / "blocking", Rules.BLOCKING, after_a_word, tmp_path / "blocking", 2.0, seconds=2.0)


@pytest.mark.parametrize("orders", ["sr sr", "rs rs"])
def test_two_ranks_that_wait_for_each_other_hang(tmp_path: Path, orders: str) -> None:
    check_hang(tmp_path, Rules.LAZY, in_turn, orders)


def test_other_sizes_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"runs allreduce .*, others do not"):
        run_ranks(under, 2, 2, tmp_path, Rules.LAZY, of_other_sizes)


def test_memory_that_is_written_too_early_changes_numbers(tmp_path: Path) -> None:
    assert run_ranks(under, 2, 2, tmp_path, Rules.LAZY, changed_too_early) == [1.0, 1.0]


def differing(rank: int, ranks: int, folder: Path, rules: Sequence[Rules], fn: Callable[..., Any], *args: Any) -> list[str]:
    """The rules under which a training of this rank has other numbers than over gloo, with the names of the numbers."""
    found, expected = list[str](), by_name(fn(rank, *args))
    for each in rules:
        (folder / each.name).mkdir(exist_ok=True)
        with nccl_rules(rank, ranks, folder / each.name, each) as groups:
            numbers = by_name(fn(rank, *args))
            assert sum(len(group.log) for group in groups) > 0
        found += [f"{each.name}: {name}" for name in unequal(numbers, expected)]
    return found


def by_name(numbers: Any) -> dict[str, Tensor | None]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(numbers, Tensor) or numbers is None:
        return {"": numbers}
    each = numbers.items() if isinstance(numbers, Mapping) else enumerate(numbers)
    return {f"{key} {name}": value for key, part in each for name, value in by_name(part).items()}


def check(tmp_path: Path, ranks: int, fn: Callable[..., Any], *args: Any, rules: Sequence[Rules]) -> None:
    assert run_ranks(differing, ranks, ranks, tmp_path, rules, fn, *args) == [[]] * ranks


STRICTEST = (Rules.LAZY, Rules.BLOCKING)  # a table that hangs under SERIAL hangs under BLOCKING


class Run(NamedTuple):
    """One training of a pipeline alone."""

    schedule: str
    model: str = "skip"
    batched: bool = False
    options: Mapping[str, Any] = {}

    def train(self, rank: int, ranks: int) -> Any:
        stages = default_stages(self.schedule, ranks)
        schedule: Any = self.schedule
        if self.batched:
            schedule = batch_p2p(add_send_recv(make_table(self.schedule, ranks, stages, 8)), ("all",))
        options = {"split": CUTS[stages], "microbatches": 8, "schedule": schedule, **self.options}
        return train(rank, self.model, options, 2)


def train_all(rank: int, ranks: int, runs: Sequence[Run]) -> list[Any]:
    return [run.train(rank, ranks) for run in runs]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "runs", "rules"),
    [
        (2, (Run("ZBVZeroBubble"), Run("Interleaved1F1B", batched=True), Run("DualPipeV", "tied")), STRICTEST),
        *further(
            (4, (Run("1F1B"), Run("1F1B", batched=True), Run("GPipe", "tied")), STRICTEST),
            (2, (Run("ZBVZeroBubble"), Run("Interleaved1F1B", batched=True), Run("DualPipeV", "tied")), [Rules.EAGER]),
            (2, (Run("1F1B", options={"backend": "inductor"}),), STRICTEST),
            (4, (Run("1F1B"), Run("ZB1P"), Run("ZB2P"), Run("GPipe", batched=True)), tuple(Rules)),
            (2, tuple(Run(each) for each in ("LoopedBFS", "InterleavedZeroBubble", "V-Half", "V-Min")), tuple(Rules)),
        ),
    ],
)
def test_a_pipeline(tmp_path: Path, ranks: int, runs: Sequence[Run], rules: Sequence[Rules]) -> None:
    check(tmp_path, ranks, train_all, ranks, runs, rules=rules)


def between_steps(rank: int, options: Mapping[str, Any]) -> Any:
    """Steps; between them an evaluation, a call that is refused because the ranks differ, and a profile."""
    with capturing("skip"):
        case = CASES["skip"]()
        pipe = compiled(case, split=CUTS[2], microbatches=4, **options)
        found = [step(pipe, case.batch).losses]
        found.append(pipe.eval(*case.batch.args, target=case.batch.target, **case.batch.kwargs).losses)
        with pytest.raises(graphpp.MismatchError):
            step(pipe, case.batch._replace(target=case.batch.target + rank))
        pipe.profile(*case.batch.args, target=case.batch.target, repeat=1, **case.batch.kwargs)
        found += [step(pipe, case.batch).losses, pipe.clip_grad_norm_(0.5)]
        return found, local_grads(pipe)


@pytest.mark.parametrize("schedule", ["1F1B", *further("GPipe")])
def test_calls_between_steps(tmp_path: Path, schedule: str) -> None:
    check(tmp_path, 2, between_steps, {"schedule": schedule}, rules=STRICTEST)


def with_early_receives(rank: int) -> None:
    """A training whose receives are posted as early as over gloo."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(mailbox, "receives_overtake", lambda group, device: True)
        Run("ZBVZeroBubble").train(rank, 2)


@pytest.mark.exhaustive
def test_receives_that_are_posted_early_would_hang(tmp_path: Path) -> None:
    check_hang(tmp_path, Rules.EAGER, with_early_receives, seconds=30.0)


# ------------------------------------------------------------------------------------------------------- meshes

PIPE_REPLICAS, PIPE_SHARDS = Mesh((2, 2), ("pp", "dp_replicate")), Mesh((2, 2), ("pp", "dp_shard"))
HYBRID, PIPE_TENSOR = Mesh((2, 2), ("dp_replicate", "dp_shard")), Mesh((2, 2), ("pp", "tp"))
SHARDS_TENSOR, PIPE_EXPERTS = Mesh((2, 2), ("dp_shard", "tp")), Mesh((2, 2), ("pp", "ep"))
PIPE_CONTEXT = Mesh((2, 2), ("pp", "cp"))


def sharded(rank: int, mesh: Mesh, schedule: str, keep: int | None, sum_order: Any = "ranks") -> Any:
    options = {"split": CUTS[default_stages(schedule, mesh.size("pp"))], "schedule": schedule}
    parallel = graphpp.Parallel(keep=keep, sum_order=sum_order)
    return sharding.train_on_mesh(rank, mesh, {**options, "parallel": parallel}, True, 0.5)


def tensors(rank: int, mesh: Mesh, schedule: str, sequence: bool) -> Any:
    options = {"split": tensor_parallel.CUTS[default_stages(schedule, mesh.size("pp"))], "schedule": schedule}
    return tensor_parallel.train_on_mesh(rank, mesh, {}, sequence, options)


def experts(rank: int, mesh: Mesh, schedule: str) -> Any:
    options = {"split": expert_parallel.CUTS[default_stages(schedule, mesh.size("pp"))], "schedule": schedule}
    return expert_parallel.train_on_mesh(rank, mesh, options)


def context(rank: int, mesh: Mesh, schedule: str) -> Any:
    shape = dict(zip(mesh.names, mesh.sizes, strict=True))
    losses, state = train_with_context(rank, shape, schedule, "ulysses", "eager")
    return torch.tensor(losses), state


@pytest.mark.parametrize(
    ("train", "mesh", "args"),
    [
        (sharded, PIPE_SHARDS, ("Interleaved1F1B", 0)),
        *further(
            (experts, PIPE_EXPERTS, ("DualPipeV",)),
            (sharded, PIPE_REPLICAS, ("ZBVZeroBubble", None)),
            (tensors, PIPE_TENSOR, ("1F1B", True)),
            (context, PIPE_CONTEXT, ("1F1B",)),
            (sharded, PIPE_REPLICAS, ("Interleaved1F1B", None)),
            (sharded, PIPE_SHARDS, ("LoopedBFS", 1)),
            (sharded, HYBRID, ("auto", 0)),
            (sharded, HYBRID, ("auto", None, "any")),
            (sharded, PIPE_SHARDS, ("ZBVZeroBubble", 0, "any")),
            (sharded, PIPE_SHARDS, ("DualPipeV", None)),
            (sharded, PIPE_SHARDS, ("ZBVZeroBubble", 0)),
            (tensors, PIPE_TENSOR, ("Interleaved1F1B", True)),
            (tensors, PIPE_TENSOR, ("ZBVZeroBubble", False)),
            (tensors, SHARDS_TENSOR, ("auto", True)),
            (experts, PIPE_EXPERTS, ("1F1B",)),
            (context, PIPE_CONTEXT, ("ZBVZeroBubble",)),
        ),
    ],
)
def test_a_mesh(tmp_path: Path, train: Callable[..., Any], mesh: Mesh, args: Sequence[Any]) -> None:
    check(tmp_path, mesh.ranks, train, mesh, *args, rules=STRICTEST)
