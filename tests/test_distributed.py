"""The helper that runs functions on several ranks: values, failures, deaths, and workers that are used again."""

import os
import signal
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from tests.distributed import WorkerDied, WorkerLate, rank_outcomes, run_ranks


class UnpicklableError(Exception):
    """Cannot be built again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def total(rank: int, start: float) -> torch.Tensor:
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return value


def process(rank: int) -> tuple[int, int, int]:
    return rank, dist.get_world_size(), os.getpid()


def fails(rank: int, where: int) -> None:
    if rank == where:
        raise KeyError("the reason")
    dist.barrier()


def fails_oddly(rank: int) -> None:
    raise UnpicklableError("two", "parts")


def aborts(rank: int) -> None:
    signal.raise_signal(signal.SIGABRT)


def dies(rank: int, where: int) -> None:
    if rank == where:
        os._exit(7)
    dist.barrier()


def sleeps(rank: int, where: int) -> None:
    if rank == where:
        time.sleep(60)


def warns(rank: int) -> None:
    warnings.warn("look", UserWarning, stacklevel=1)


def draws(rank: int) -> float:
    return torch.rand(()).item()


def test_values_come_in_order_of_rank() -> None:
    values = run_ranks(total, 2, 10.0)
    assert [value.item() for value in values] == [21.0, 21.0]


def test_workers_are_used_again_in_a_fresh_group() -> None:
    one = run_ranks(process, 1)
    two = run_ranks(process, 2)
    again = run_ranks(process, 2)
    assert two == again
    assert one[0][2] == two[0][2]
    assert [(rank, ranks) for rank, ranks, _ in two] == [(0, 2), (1, 2)]


def test_every_task_starts_from_the_same_seed() -> None:
    assert run_ranks(draws, 1) == run_ranks(draws, 1)


def test_exception_keeps_its_type_and_names_its_rank() -> None:
    with pytest.raises(KeyError, match="the reason") as caught:
        run_ranks(fails, 2, 1)
    notes = "\n".join(caught.value.__notes__)
    assert "on rank 1:" in notes
    assert "in fails" in notes
    assert run_ranks(total, 2, 0.0)[0].item() == 1.0


def test_a_signals_death_says_where() -> None:
    (outcome,) = rank_outcomes(aborts, 1)
    assert isinstance(outcome.error, WorkerDied)
    assert "exit code -6" in str(outcome.error)
    assert "in aborts" in outcome.error.__notes__[0]


def test_exception_that_cannot_be_pickled_is_named() -> None:
    with pytest.raises(RuntimeError, match="UnpicklableError: two parts"):
        run_ranks(fails_oddly, 1)


def test_outcomes_of_a_death() -> None:
    outcomes = rank_outcomes(dies, 2, 1)
    assert isinstance(outcomes[1].error, WorkerDied)
    assert "exit code 7" in str(outcomes[1].error)
    assert isinstance(outcomes[0].error, RuntimeError)
    assert run_ranks(total, 2, 0.0)[0].item() == 1.0


def test_late_rank_is_ended() -> None:
    outcomes = rank_outcomes(sleeps, 2, 0, timeout=6)
    assert isinstance(outcomes[0].error, WorkerLate)
    assert outcomes[1].error is None


def test_callers_warning_filters_hold_on_the_ranks() -> None:
    with pytest.raises(UserWarning, match="look"):
        run_ranks(warns, 1)
