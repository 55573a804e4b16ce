"""Streams and events: no memory is read, written or freed before its last use on another stream."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp import streams
from graphpp.backends.cuda_graphs import CudaGraphRecorder
from graphpp.runtime.offloader import CudaMover
from graphpp.runtime.task import Task
from graphpp.streams import InputCopies
from tests.device_trace import COMPUTE, HOST, FakeEvent, FakeStream, Trace, recording
from tests.internals import last_runner

CPU = torch.device("cpu")
SIDE = "side stream"


def crossing(*, out: bool = True, back: bool = True, freed: bool = False, deferred: bool = False, host: bool = False) -> Trace:
    """A value that the compute stream makes and a side stream reads; then it is freed, or written again.

    `out`, `back`: whether the side stream waits for the compute stream, and this for it.
    """
    trace = Trace()
    trace.allocate("x", "x", COMPUTE)
    trace.kernel("make", COMPUTE, writes=["x"])
    if out:
        trace.wait(SIDE, trace.snapshot(COMPUTE))
    trace.kernel("copy", SIDE, reads=["x"])
    if back:
        trace.wait(HOST if host else COMPUTE, trace.snapshot(SIDE))
    if deferred:
        trace.defer("x", SIDE)
    if freed:
        trace.free("x")
        trace.allocate("x", "y", COMPUTE)
    trace.kernel("overwrite", COMPUTE, writes=["x"])
    return trace


@pytest.mark.parametrize("options", [{}, {"freed": True}, {"host": True}, {"back": False, "freed": True, "deferred": True}])
def test_right_orders_have_no_race(options: dict[str, bool]) -> None:
    assert crossing(**options).races == []


@pytest.mark.parametrize(
    ("options", "race"),
    [
        ({"out": False}, r"x is read by copy .* does not wait for make .*: side stream must wait for the compute stream"),
        ({"back": False}, r"x is written by overwrite .* does not wait for copy .*: the compute stream must wait for side"),
        ({"back": False, "freed": True}, r"y is written in the place of x, which was freed, by overwrite .* not wait for copy"),
    ],
)
def test_a_missing_wait_is_a_race(options: dict[str, bool], race: str) -> None:
    (found,) = crossing(**options).races
    assert re.search(race, found)


def test_an_event_covers_only_what_came_before_it() -> None:
    trace = Trace()
    trace.allocate("x", "x", COMPUTE)
    early = trace.snapshot(SIDE)
    trace.kernel("write", SIDE, writes=["x"])
    trace.wait(COMPUTE, early)
    trace.kernel("read", COMPUTE, reads=["x"])
    assert len(trace.races) == 1


def offload() -> list[str]:
    """Values that leave and come back while others are computed, by the mover of a GPU."""
    with recording() as recorder:
        mover = CudaMover(CPU)
        for _ in range(3):
            value = torch.ones(4, 6).t() * 2
            copy = mover.evict(value)
            del value
            torch.ones(24).sum()
            mover.free(copy)
            mover.prefetch(copy)
            torch.ones(24).sum()
            assert torch.equal(mover.restore(copy), torch.full((6, 4), 2.0))
            del copy
        left = mover.evict(torch.ones(5))
        mover.abandon()
        del left
        torch.ones(5)
    assert recorder.trace.kernels["side stream 1"] == 7
    assert recorder.trace.freed
    return recorder.trace.races


def test_offloaded_values_are_ordered() -> None:
    assert offload() == []


def ignore(*args: Any) -> None:
    """Wait for nothing."""


@pytest.mark.parametrize(
    ("target", "name", "race"),
    [
        (FakeStream, "wait_event", "which was freed"),
        (FakeStream, "wait_stream", "read by copy_"),
        (CudaMover, "abandon", "which was freed"),
    ],
)
def test_an_offloader_without_one_of_its_waits_races(
    monkeypatch: pytest.MonkeyPatch, target: type, name: str, race: str
) -> None:
    monkeypatch.setattr(target, name, ignore)
    assert any(race in each for each in offload())


def warm_up() -> list[str]:
    """A run on the stream of the recordings; its argument and its result are used on the current stream."""
    with recording() as recorder:
        given = torch.ones(4) * 2
        (result,) = CudaGraphRecorder(CPU).warm_up(lambda: [given * 3])
        given.add_(1)
        result.add_(1)
    assert recorder.trace.kernels["side stream 1"] == 1
    return recorder.trace.races


def test_the_warm_up_of_recordings_is_ordered() -> None:
    assert warm_up() == []


def test_a_warm_up_without_its_waits_races(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeStream, "wait_stream", ignore)
    assert len(warm_up()) == 2


def failing_warm_up() -> list[str]:
    """A run that raises when it has read its argument, which is freed and whose memory is taken again."""

    def run(given: torch.Tensor) -> list[torch.Tensor]:
        given.sum()
        raise RuntimeError("out of luck")

    with recording() as recorder:
        with pytest.raises(RuntimeError, match="out of luck"):
            CudaGraphRecorder(CPU).warm_up(partial(run, torch.ones(4) * 2))
        torch.ones(4)
    return recorder.trace.races


def test_a_warm_up_that_fails_is_waited_for() -> None:
    assert failing_warm_up() == []


def changed_input(*, finish: bool) -> list[str]:
    """A caller writes to pinned memory that a step has copied to the device."""
    with recording() as recorder:
        copies = InputCopies(torch.device("cpu", 0))  # another device than that of the batch
        with recorder.on_host():
            batch = torch.empty(4, pin_memory=True).fill_(1)
        copies.take(batch).sum()
        if finish:
            copies.finish()
        with recorder.on_host():
            batch.add_(1)
    return recorder.trace.races


def test_inputs_may_be_changed_after_a_step() -> None:
    assert changed_input(finish=True) == []
    (race,) = changed_input(finish=False)
    assert re.search(r"is written by add_ .*, which does not wait for _to_copy .*: the host must wait for the compute", race)


def input_changed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], RuntimeError]:
    """A caller writes to a pinned batch after a step that failed in its second microbatch."""
    pipe = graphpp.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.functional.mse_loss, split=2, microbatches=2)
    x, arguments = torch.ones(4, 4), Task.arguments
    pipe.step(x, target=x)

    def failing(task: Task) -> list[Any]:
        given = arguments(task)
        if task.key.microbatch == 1:
            raise RuntimeError("out of luck")
        return given

    monkeypatch.setattr(Task, "arguments", failing)
    with recording() as recorder:
        for stage in last_runner(pipe).stages.values():
            stage.buffers.copies = InputCopies(torch.device("cpu", 0))
        with recorder.on_host():
            batch = torch.empty(4, 4, pin_memory=True).fill_(1)
        with pytest.raises(RuntimeError, match="out of luck") as error:
            pipe.step(batch, target=x)
        with recorder.on_host():
            batch.add_(1)
    return recorder.trace.races, error.value


def test_inputs_may_be_changed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    races, error = input_changed_after_an_error(monkeypatch)
    assert races == [] and not hasattr(error, "__notes__")


def test_an_error_says_that_a_device_that_waits_for_another_rank_reads_its_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", lambda event: False)
    monkeypatch.setattr(streams, "_SECONDS_AFTER_ERROR", 0)
    races, error = input_changed_after_an_error(monkeypatch)
    assert len(races) == 1 and "is written by add_" in races[0]
    assert error.__notes__ == [streams._STILL_READ]


def broken(event: FakeEvent) -> bool:
    """Asks a device that has failed."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_the_error_of_a_step_comes_through_where_the_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEvent, "query", broken)
    input_changed_after_an_error(monkeypatch)  # raises "out of luck"
