"""Step hooks: the numbers of each step, one call late; their errors on all ranks; no work without a hook."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphpp
from graphpp.pipeline import step_record
from graphpp.runtime.messages.mailbox import Mailbox
from tests.distributed import rank_outcomes, run_ranks

X = torch.linspace(-1, 1, 128).view(8, 16)
Y = X.cos()


def made(**options: Any) -> graphpp.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
    options = {"split": ["2"], "microbatches": 4} | options
    return graphpp.compile(model, nn.functional.mse_loss, example=graphpp.Microbatch((X[:2],), target=Y[:2]), **options)


def test_a_hook_gets_each_step_once_with_the_numbers_of_the_step() -> None:
    pipe, found, losses, norms = made(), list[graphpp.StepMetrics](), [], []
    with pipe.register_step_hook(found.append):
        for _ in range(3):
            assert len(found) == max(0, len(losses) - 1), "one call late"
            losses.append(float(pipe.step(X, target=Y).loss))
            norms.append(float(pipe.clip_grad_norm_(0.1)))
        pipe.eval(X, target=Y)
        assert len(found) == 2, "an evaluation is no step"
    pipe.step(X, target=Y)
    assert [each.step for each in found] == [1, 2, 3], "the last one when the hook was removed, and no step after it"
    assert [each.loss for each in found] == losses and [each.grad_norm for each in found] == norms
    for each, following in zip(found, [*found[1:], None], strict=True):
        assert each.rows == 8 and each.seconds > 0 and not each.actions
        assert following is None or each.began + each.seconds <= following.began + 1e-3
        assert (each.waited, each.sent_bytes, each.shard_bytes, each.peak_bytes) == (0, 0, None, None)


def test_hooks_of_some_steps_and_with_actions() -> None:
    pipe, rare, whole = made(), list[graphpp.StepMetrics](), list[graphpp.StepMetrics]()
    with pipe.register_step_hook(rare.append, every=3), pipe.register_step_hook(whole.append, every=2, actions=True):
        for _ in range(7):
            pipe.step(X, target=Y)
        pipe.profile(X, target=Y, repeat=1)
    assert [each.step for each in rare] == [3, 6] and [each.step for each in whole] == [2, 4, 6]
    assert rare[0].grad_norm is None and not rare[1].actions
    for each in whole:
        row = [action for action in pipe.plan.schedule.table[0] if action is not None]
        assert sorted(str(event.action) for event in each.actions) == sorted(map(str, row))
        end = each.began + each.seconds
        assert all(each.began <= event.start <= event.end <= end + 1e-4 for event in each.actions)


def test_a_step_that_no_hook_wants_is_not_marked() -> None:
    pipe = made()
    handle = pipe.register_step_hook(lambda metrics: None, every=2)
    with patch.object(step_record, "Clock", side_effect=AssertionError("marked")):
        pipe.step(X, target=Y)
        with pytest.raises(AssertionError, match="marked"):
            pipe.step(X, target=Y)
        handle.remove()
        for _ in range(3):
            pipe.step(X, target=Y)


@pytest.mark.parametrize("arguments", [{"every": 0}, {"hook": 3}, {"actions": "yes"}])
def test_wrong_arguments_are_refused_by_name(arguments: dict[str, Any]) -> None:
    with pytest.raises(graphpp.GraphPPError, match=next(iter(arguments))):
        made().register_step_hook(**{"hook": print, **arguments})


def measured(rank: int) -> list[tuple[graphpp.StepMetrics, int, float]]:
    """The numbers of three steps, the last of other sizes; the bytes that were packed; the wait that the mailbox has summed."""
    pipe, found, packed, sums = made(), list[graphpp.StepMetrics](), [0], []
    pack = Mailbox.outgoing

    def counted(*given: Any) -> Any:
        message = pack(*given)
        packed[-1] += sum(tensor.nbytes for tensor in message.tensors)
        return message

    with patch.object(Mailbox, "outgoing", counted), pipe.register_step_hook(found.append):
        for rows in (8, 8, 7):
            pipe.step(X[:rows], target=Y[:rows])
            sums.append((packed[-1], pipe._calls.last.runner.mailbox.waited))
            packed.append(0)
    return [(metrics, *each) for metrics, each in zip(found, sums, strict=True)]


def test_two_ranks_count_their_bytes_and_waits() -> None:
    for rank in run_ranks(measured, 2):
        assert [metrics.rows for metrics, *_ in rank] == [8, 8, 7]
        for metrics, packed, waited in rank:
            assert metrics.sent_bytes == packed > 0
            assert waited <= metrics.waited <= metrics.seconds


def sharded(rank: int) -> list[int | None]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    pipe, found = made(mesh=mesh, split=None, parallel=graphpp.Parallel(keep=0)), list[graphpp.StepMetrics]()
    with pipe.register_step_hook(found.append):
        pipe.step(X, target=Y)
        pipe.step_microbatches([graphpp.Microbatch((X[:2],), target=Y[:2])] * 2)  # fewer gathers than those of the plan
    return [each.shard_bytes for each in found] + [pipe.plan.sharding.ranks[0].sent]


def test_bytes_of_shards_are_those_of_the_plan_or_unknown() -> None:
    for of_plan, unknown, planned in run_ranks(sharded, 2):
        assert of_plan == planned > 0 and unknown is None


def refuses(rank: int) -> int:
    pipe = made()

    def hook(metrics: graphpp.StepMetrics) -> None:
        raise ValueError("the disk is full")

    handle = pipe.register_step_hook(hook) if rank == 1 else None
    pipe.step(X, target=Y)
    with pytest.raises(graphpp.MismatchError if rank == 0 else ValueError, match="the disk is full") as caught:
        pipe.step(X, target=Y)
    assert rank == 0 or "raised by the step hook" in caught.value.__notes__[0]
    if handle is not None:
        handle.remove()
    pipe.step(X, target=Y)
    return pipe.steps


def test_an_error_of_a_hook_is_raised_on_all_ranks_before_anything_runs() -> None:
    assert [outcome.value for outcome in rank_outcomes(refuses, 2)] == [2, 2]
