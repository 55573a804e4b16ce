"""After a timeout, the error tells a rank that is stopped from a rank that is late, and names the line of the late one."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F

import graphpp
from graphpp._torch.distributed import default_store
from graphpp.errors import RankFailure
from graphpp.parallel import late_rank, lost_rank
from graphpp.parallel.lost_rank import FailureBoard
from graphpp.parallel.rank_tree import RankTree
from graphpp.runtime.messages import mailbox
from tests.distributed import rank_outcomes, run_ranks
from tests.parallel.test_agreement import SOON, STEP, TWO, Plain, X, Y


def two_good_steps(slow_after: float | None = None) -> graphpp.Pipeline:
    torch.set_num_threads(1)
    parallel = graphpp.Parallel(timeout=STEP if slow_after is None else SOON, start_timeout=SOON, slow_after=slow_after)
    pipe = graphpp.compile(Plain(), F.cross_entropy, parallel=parallel, **TWO)
    for _ in range(2):
        pipe.step(X, target=Y)
    return pipe


def loads_slowly(rank: int) -> str:
    pipe = two_good_steps()
    if rank == 1:
        read_from_a_slow_disk()
    with patch.object(late_rank, "_PATIENCE", SOON):  # a rank that runs answers in the end, also on a busy machine
        return failure_of_a_step(pipe)


def failure_of_a_step(pipe: graphpp.Pipeline) -> str:
    try:
        pipe.step(X, target=Y)
    except RankFailure as error:
        default_store().set("given up", "")
        return str(error)
    return "no error"


def read_from_a_slow_disk() -> None:
    default_store().wait(["given up"], timedelta(seconds=SOON))


def test_a_late_rank_is_named_with_its_line() -> None:
    waiting, late = run_ranks(loads_slowly, 2)
    line = read_from_a_slow_disk.__code__.co_firstlineno + 1
    place = f"test_late_rank.py:{line} (read_from_a_slow_disk)"
    assert waiting.startswith("rank 1 did not answer in time: the process of rank 1 runs, and is at ")
    assert place in waiting.partition(", and rank 0")[0]
    assert late.startswith("the other ranks have given up this step, because rank 1, this one, did not answer in time")


def is_stopped(rank: int) -> str:
    """A step of which rank 1 is stopped, until rank 0 has given up."""
    pipe, store = two_good_steps(), default_store()
    if rank == 1:
        store.set("process", str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
        return failure_of_a_step(pipe)
    process = int(store.get("process"))
    try:
        return failure_of_a_step(pipe)
    finally:
        os.kill(process, signal.SIGCONT)


def test_a_stopped_rank_is_told_from_a_late_one() -> None:
    waiting, stopped = rank_outcomes(is_stopped, 2)
    assert waiting.value.startswith("rank 1 did not answer in time: stopped by a signal or a debugger")
    assert stopped.value is not None
    assert "this one" in stopped.value


def counts_threads(rank: int) -> list[str]:
    two_good_steps()
    two_good_steps()
    until = time.monotonic() + SOON  # the thread of an earlier test's process group ends at its next look
    while len(found := names_of_threads()) > 1 and time.monotonic() < until:
        time.sleep(0.1)
    return found


def names_of_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("graphpp")]


def test_one_thread_serves_all_pipelines() -> None:
    assert run_ranks(counts_threads, 2) == [["graphpp late rank"], ["graphpp late rank"]]


def host_waits(rank: int, fate: str) -> list[str]:
    """The log of rank 0, whose device waits for a rank that has died, or is late before the call or in it."""
    pipe, store, records = two_good_steps(), default_store(), list[str]()
    board, timeout = pipe._calls._board, STEP if fate == "dies" else 0.1
    board._calls += 1
    if rank == 1 and fate == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1:
        with late_rank.calling(board._key("")) if fate == "in the call" else contextlib.nullcontext():
            read_from_a_slow_disk()
        return []
    board._issued = lost_rank._Issued(board._key(""), lambda: False, timeout)
    with (
        patch.object(lost_rank._LOG, "error", lambda text, *args: records.append(text % args)),
        patch.object(late_rank, "_PATIENCE", SOON),
    ):
        late_rank.when_idle(board)
        until = time.monotonic() + SOON
        while not records and time.monotonic() < until:
            time.sleep(0.1)
    store.set("given up", "")
    return records


@pytest.mark.parametrize("fate", ["dies", "before the call", "in the call"])
def test_a_host_that_waits_for_the_device_logs_for_whom(fate: str) -> None:
    (record,) = rank_outcomes(host_waits, 2, fate)[0].value
    found = "is lost" if fate == "dies" else "did not answer in time: the process of rank 1 runs, and is at "
    assert record.startswith(f"rank 1 {found}") and ", and the GPU of rank 0 waits for a message, the host at " in record
    assert "test_late_rank.py" in record.partition("the host at")[2]


def test_a_rank_whose_device_waits_too_is_not_late() -> None:
    """Ranks 0 and 2 have issued the fourth call, and rank 1 is in it; rank 3, of a replica, has issued its own fourth call."""
    here, board = "graphpp/lost/a/4/", FailureBoard((None,), "a")
    board._pipeline, board._ranks = RankTree((0, 1, 2), (), 3), {0, 1, 2, 3}
    answers = {
        1: late_rank.Answer(here, ("graphpp/lost/a/3/",), "a.py:1"), 2: late_rank.Answer(None, (here,), "b.py:2"),
        3: late_rank.Answer("graphpp/lost/c/5/", ("graphpp/lost/c/4/",), "c.py:3"),
    }  # fmt: skip
    with patch.object(late_rank, "ask", lambda ranks: answers), patch.object(lost_rank.dist, "get_rank", lambda: 0):
        found = board._late((), here)
        assert found is not None and found.ranks == (1,) and found.fate.endswith("and is at a.py:1")
        answers[1] = answers[2]
        assert board._late((), here) is None


def asks_twice(rank: int) -> bool:
    """Whether rank 1 answers two ranks that ask at the same time."""
    two_good_steps()
    store = default_store()
    if rank == 1:
        read_from_a_slow_disk()
        return True
    question = f"{late_rank._KEY}/1"
    first = store.add(question, 1)
    with patch.object(late_rank, "_PATIENCE", SOON):
        second = late_rank.ask([1])[1]
    store.set("given up", "")
    return second is not None and store.check([f"{question}/{first}"])


def test_a_rank_answers_all_ranks_that_ask() -> None:
    assert run_ranks(asks_twice, 2) == [True, True]


def warned(rank: int, fate: str) -> list[str]:
    """The warnings of rank 0, for which rank 1 is late before the call, or slow in the first action of its row."""
    pipe, store, lines = two_good_steps(slow_after=0.2), default_store(), list[str]()
    runner = pipe._calls.last.runner
    if rank == 1 and fate == "slow":
        (action, name, function), *others = runner._loop._row
        runner._loop._row = [(action, name, lambda: (read_from_a_slow_disk(), function())), *others]
    elif rank == 1:
        read_from_a_slow_disk()

    def note(text: str, *values: object) -> None:
        lines.append(text % values)
        store.set("given up", "")

    with (
        patch.object(lost_rank._LOG, "warning", note),
        patch.object(mailbox._LOG, "warning", note),
        patch.object(late_rank, "_PATIENCE", SOON),
    ):
        pipe.step(X, target=Y)
        pipe.step(X, target=Y)
    return lines


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        ("late", r"rank 0 has waited \d s in a call for rank 1, which .*, and is at .*\(read_from_a_slow_disk\)"),
        ("slow", r"rank 0 has waited \d s in 0RECV_B0 for rank 1"),
    ],
)
def test_a_rank_that_waits_long_says_so_once(fate: str, said: str) -> None:
    ((line,), others) = run_ranks(warned, 2, fate)
    assert re.fullmatch(said, line) and others == []


def test_warnings_of_waits_keep_a_distance() -> None:
    slow = late_rank.SlowWaits(2.0)
    with patch.object(late_rank.time, "monotonic", iter([0.0, 1.0, 20.9, 21.1]).__next__):
        assert [slow.says(seconds) for seconds in (1.9, 2.0, 100.0, 3.0)] == [False, True, False, True]
