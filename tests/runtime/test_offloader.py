"""Offloaded values: the same bits under every table, which values leave and when, and their part in plan and memory cap."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import graphpp
from graphpp.errors import GraphPPError, ScheduleError
from graphpp.options.offload import Offload, read_offload
from graphpp.runtime.program import TensorMeta
from graphpp.runtime.task import Task
from graphpp.schedules.table.offload_window import OffloadWindow
from tests import internals
from tests.distributed import run_ranks
from tests.exhaustive import further
from tests.movers import CopyingMover, moving_by
from tests.training import CASES, Numbers, capturing_once, differences, eager, train, whole

ALL = Offload(least_bytes=0)
OVERLAPPED = "r0 0F0 1F0 0F1 (1F1;1B0)OVERLAP_F_B (0F2;0B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 0B1 1B2 0B2"


@pytest.fixture(autouse=True, scope="module")
def one_capture() -> Iterator[None]:
    with capturing_once():
        yield


def trained(name: str, options: Mapping[str, Any]) -> tuple[Numbers, CopyingMover]:
    """One process, in which values are really copied."""
    mover = CopyingMover()
    with moving_by(mover):
        return train(0, name, {"memory": graphpp.Memory(offload=ALL), **options}), mover


def on_rank(rank: int, schedules: list[str]) -> tuple[list[Numbers], int]:
    """The numbers of a step under each schedule, and how many values were offloaded on this rank."""
    mover = CopyingMover()
    with moving_by(mover), capturing_once():
        options = [{"schedule": each, "split": 2 if each == "1F1B" else 4} for each in schedules]
        return [
            train(rank, "skip", {"memory": graphpp.Memory(offload=ALL), "microbatches": 4, **each}, 1)
            for each in options
        ], mover.moved


@pytest.mark.first_cases(2)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "GPipe", "split": 2},
        *further({"schedule": "GPipe", "split": 1}),
        {"schedule": "ZBVZeroBubble", "split": 2},
        {"schedule": "GPipe", "split": 2, "memory": graphpp.Memory(recompute="full", offload=ALL)},
        *further({"schedule": graphpp.Schedule.parse(OVERLAPPED), "split": 2}),
        {"schedule": graphpp.Schedule.parse("r0 0F0 1F0 0F1 1F1 0F2 1F2 1I0 1I1 0I0 1W0 0W0 1I2 0I1 1W2 0W1 0I2 1W1 0W2")},
    ],
)
def test_the_bits_of_a_plain_loop(options: dict[str, Any]) -> None:
    found, mover = trained("llama", {"microbatches": 3, **options})
    assert differences(found, eager("llama", 3)) == []
    assert mover.moved > 0
    assert mover.evicted == 0
    assert mover.most > 0


@pytest.mark.parametrize("name", ["skip", "norms", "tied"])
def test_other_models(name: str) -> None:
    options = {"schedule": "GPipe", "split": 2, "microbatches": 3}
    found, mover = trained(name, options)
    assert mover.moved > 0
    assert differences(found, train(0, name, options)) == []


def test_two_ranks() -> None:
    schedules = ["1F1B", "InterleavedZeroBubble", "DualPipeV"]
    found = run_ranks(on_rank, 2, schedules)
    plain = eager("skip", 4, 1)
    for index, schedule in enumerate(schedules):
        assert differences(whole([numbers[index] for numbers, _ in found]), plain) == [], schedule
    assert found[0][1] > 0


def planned(choice: Any, schedule: Any, microbatches: int = 4, split: int = 1, debug: Any = None, **memory: Any) -> Any:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    example = graphpp.Microbatch((torch.zeros(512, 64),), target=torch.zeros(512, 64))
    return graphpp.compile(
        model,
        nn.functional.mse_loss,
        example=example,
        split=split,
        schedule=schedule,
        microbatches=microbatches,
        memory=graphpp.Memory(offload=choice, **memory),
        debug=debug,
    )


def windows(pipe: graphpp.Pipeline) -> tuple[OffloadWindow, ...]:
    return pipe.plan.offload_windows


def test_values_with_a_long_enough_window_are_evicted() -> None:
    """GPipe on one rank: F0 F1 F2 F3 B0 B1 B2 B3; each backward comes four actions after its forward."""
    found = windows(planned(True, "GPipe"))
    assert [window.microbatch for window in found] == [0, 1, 2, 3]
    assert [str(window.evict_after) for window in found] == ["0F1", "0F2", "0F3", "0B0"]
    assert [str(window.prefetch_at) for window in found] == ["0F3", "0B0", "0B1", "0B2"]
    assert [str(window.first_use) for window in found] == ["0B0", "0B1", "0B2", "0B3"]


def test_the_largest_first_up_to_the_fraction() -> None:
    pipe = planned(0.5, "GPipe")
    stage = pipe.programs(0)
    sizes = {meta.name: meta.nbytes for meta in stage.saved}
    for window in windows(pipe):
        least = min(sizes[name] for name in window.values)
        stay = [size for name, size in sizes.items() if name not in window.values]
        assert window.nbytes - least < stage.saved_bytes / 2 <= window.nbytes
        assert least >= max(size for size in stay if size <= least)
    assert windows(planned(0, "GPipe")) == windows(planned(0.0, "GPipe")) == windows(planned(False, "GPipe")) == ()


def test_a_function_says_which() -> None:
    seen: list[TensorMeta] = []

    def last_two(value: TensorMeta) -> bool:
        seen.append(value)
        return value.shape == (512, 64)

    found = windows(planned(last_two, "GPipe"))
    assert seen
    assert {name for window in found for name in window.values} == {meta.name for meta in seen if meta.shape == (512, 64)}
    assert windows(planned(lambda value: False, "GPipe")) == ()


def test_the_plan_shows_offloaded_values() -> None:
    pipe = planned(True, "GPipe")
    assert "offloaded" in str(pipe)
    assert "4 of 4" in str(pipe)
    assert "offloaded" not in str(planned(None, "GPipe"))
    first = [(window.microbatch, str(window.evict_after), str(window.prefetch_at)) for window in windows(pipe)][:2]
    assert first == [(0, "0F1", "0F3"), (1, "0F2", "0B0")]


def test_the_memory_cap_leaves_out_offloaded_bytes() -> None:
    """So on a device with memory of its own; on the CPU an eviction frees no memory, and all bytes count."""
    batch = torch.zeros(4096, 64)

    def run(choice: Any, cap: int) -> None:
        planned(choice, "GPipe", microbatches=8, cap=cap).step(batch, target=batch)

    memory = planned(True, "GPipe", microbatches=8).plan.memory
    assert memory is not None
    state, activations = memory.ranks[0].state, memory.ranks[0].activations
    run(True, state + activations)
    with pytest.raises(ScheduleError, match=f"{state + activations:,} bytes are alive here"):
        run(True, state + activations - 1)
    with internals.freeing_memory():
        run(True, state + activations // 2)
        with pytest.raises(ScheduleError):
            run(None, state + activations // 2)


def test_a_step_that_fails_drops_evicted_values() -> None:
    """Values are evicted when the second backward fails; the next step has the losses of an undisturbed one."""
    mover = CopyingMover()
    batch = torch.randn(2048, 64)
    with moving_by(mover):
        pipe = planned(True, "GPipe")
        reference = pipe.step(batch, target=batch).losses
        runner = internals.last_runner(pipe)
        arguments = Task.arguments

        def failing(task: Task) -> list[Any]:
            if task.program.stage == 0 and task.key.phase == "B" and task.key.microbatch == 1:
                raise RuntimeError("out of luck")
            return arguments(task)

        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="out of luck"):
            patch.setattr(Task, "arguments", failing)
            pipe.step(batch, target=batch)
        assert mover.abandoned
        assert not any(eviction.copies for eviction in runner.offloader._evictions)
        assert torch.equal(pipe.step(batch, target=batch).losses, reference)


def test_evaluation_moves_nothing() -> None:
    mover = CopyingMover()
    with moving_by(mover):
        pipe = planned(True, "GPipe")
        pipe.eval(torch.randn(2048, 64))
    assert mover.moved == 0


def test_on_the_cpu_values_stay_where_they_are() -> None:
    options = {"schedule": "GPipe", "split": 2, "microbatches": 3}
    assert differences(train(0, "llama", {**options, "memory": graphpp.Memory(offload=ALL)}), train(0, "llama", options)) == []


@pytest.mark.parametrize("wrong", [-0.1, 1.5, float("nan"), "all", 2, [0.5]])
def test_wrong_values_of_offload(wrong: Any) -> None:
    with pytest.raises(GraphPPError, match="take"):  # which field it is, `Options` adds
        read_offload(wrong)
    with pytest.raises(GraphPPError, match="offload"):
        graphpp.compile(CASES["llama"]().model, memory=graphpp.Memory(offload=wrong))
