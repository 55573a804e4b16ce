"""Runs one function on N processes joined by gloo or by NCCL, and hands back what each returned.

Contract: `run_ranks(fn, ranks, *args)` calls `fn(rank, *args)` in `ranks` processes, with the default process group
initialised over loopback, and returns the values in order of rank. `fn` is a top-level function of an importable module;
arguments and values are pickled, and tensors of values come back on the CPU. The caller's warning filters hold on the ranks
too. Environment variables that `fn` sets are gone after the call. A rank's exception is raised here with its own type, and
with the rank and its traceback as a note.

With `GRAPHPP_TEST_DEVICE=cuda` the ranks are joined by NCCL and share the GPUs; tests with the mark `nccl` hold there too.
Several ranks may share one GPU since NCCL 2.30, with `NCCL_MULTI_RANK_GPU_ENABLE=1`.

Importing torch takes seconds, so the processes stay for the next call: rank r of every call runs in worker r, each
time in a fresh group. A call that dies or runs late costs its workers, and the next call starts new ones. Workers end
with this process, however it ends.
"""

import atexit
import faulthandler
import gc
import itertools
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cache
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Thread
from traceback import format_exception
from typing import IO, Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

DEVICE = torch.device(os.environ.get("GRAPHPP_TEST_DEVICE", "cpu"))  # type of the device on which ranks train
BACKEND = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl"
GRACE = 20.0  # seconds that the other ranks are given to end after one has failed
# seconds that a call may take, on a machine that is ten times slower than this one or as busy
PATIENCE = float(os.environ.get("GRAPHPP_TEST_PATIENCE", "600"))
PRELOADED = [  # what the process that workers are forked from imports: also what a first capture would import on each rank
    *("graphpp.api", "graphpp.checkpoint.local", "tests.models", "networkx", "torch.distributed.pipelining"),
    *("torch.export._trace", "torch._functorch.aot_autograd"),
]
COLLECTED = (20_000, 20, 50)  # for `gc.set_threshold`: a capture makes objects by the hundred thousand, and hardly any garbage
START = 60.0  # seconds that new workers are given on top, to import torch


class WorkerDied(RuntimeError):  # noqa: N818 - it names an event
    """A rank's process ended while it ran the function."""


class WorkerLate(TimeoutError):  # noqa: N818 - it names an event
    """A rank did not end within the timeout."""


@dataclass(frozen=True)
class Outcome:
    """What became of the function on one rank: its value, or the exception that it raised."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0  # after the call began


@dataclass(frozen=True)
class Task:
    """One call, as a worker receives it."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    ranks: int
    store: str  # file through which the ranks find each other
    timeout: float
    filters: list[Any]  # of the module `warnings`


@dataclass(frozen=True)
class Answer:
    """What a worker sends back. Clocks are the machine's, the same in all processes."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    ended: float = 0.0
    cpu_seconds: float = 0.0  # of the worker since its last answer


@dataclass(frozen=True)
class Worker:
    process: ForkServerProcess
    pipe: connection.Connection
    stacks: IO[str]  # the file for the stacks of the process's threads, when it gets SIGUSR1 and when a signal kills it


def run_ranks(fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = PATIENCE) -> list[Any]:
    """The values of `fn(rank, *args)`, in order of rank; raises the exception of the rank that failed first."""
    outcomes = rank_outcomes(fn, ranks, *args, timeout=timeout, grace=GRACE)
    failures = sorted((o for o in outcomes if o.error is not None), key=_order_of_blame)
    if not failures:
        return [outcome.value for outcome in outcomes]
    first = failures[0].error
    assert first is not None
    for other in failures[1:]:
        first.add_note(f"rank {other.rank} failed later: {type(other.error).__name__}: {other.error}")
    raise first


def _order_of_blame(outcome: Outcome) -> tuple[bool, float]:
    """A death comes first, for it is noticed late; then who failed first."""
    return not isinstance(outcome.error, WorkerDied), outcome.seconds


def rank_outcomes(
    fn: Callable[..., Any], ranks: int, *args: Any, timeout: float = PATIENCE, grace: float | None = None
) -> list[Outcome]:
    """What became of `fn(rank, *args)` on every rank; for tests in which ranks are meant to fail.

    A rank that dies has the error `WorkerDied`, one that runs past `timeout` seconds `WorkerLate`. With `grace`, ranks
    that still run that many seconds after the first failure are late too.
    """
    began = time.monotonic()
    if len(_workers) < ranks:
        timeout += START
    try:
        store, filters = str(Path(_stores().name) / str(next(_calls))), list(warnings.filters)
        for rank, worker in enumerate(_first_workers(ranks)):
            task = Task(fn, args, rank, ranks, store, timeout, filters)
            worker.pipe.send_bytes(pickle.dumps(task))
        outcomes = _collect(ranks, began, timeout, grace)
    except BaseException:
        close_workers()
        raise
    if any(isinstance(outcome.error, WorkerDied | WorkerLate) for outcome in outcomes):
        close_workers()
    return outcomes


def on_cpu(value: Any) -> Any:
    """The value with its tensors on the CPU; tensors of the CPU are the same objects."""
    return value if DEVICE.type == "cpu" else tree_map_only(torch.Tensor, torch.Tensor.cpu, value)


@cache
def _stores() -> tempfile.TemporaryDirectory[str]:
    """The folder of all calls' stores, removed when this process ends: a `FileStore` that ends as its folder goes aborts."""
    return tempfile.TemporaryDirectory(prefix="stores-")


def close_workers() -> None:
    """End all workers; the next call starts new ones."""
    for worker in _workers:
        worker.process.kill()
    for worker in _workers:
        worker.process.join()
        worker.pipe.close()
        worker.stacks.close()
    _workers.clear()


# One list for all numbers of ranks: a call on two ranks uses the first two workers of a call on four.
_workers: list[Worker] = []
_calls = itertools.count()
_seconds_of_ranks: list[float] = []  # CPU seconds, for each answer
atexit.register(close_workers)


def cpu_seconds() -> float:
    """CPU seconds of this process so far, of its children that have ended, and of the calls of `run_ranks`."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(_seconds_of_ranks)


def _first_workers(count: int) -> list[Worker]:
    while len(_workers) < count:
        _workers.append(_start_worker(len(_workers)))
    return _workers[:count]


def _start_worker(rank: int) -> Worker:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe()
    stacks = tempfile.NamedTemporaryFile("w+", prefix="stacks-")  # noqa: SIM115 - lives as long as the worker
    process = context.Process(target=_serve, args=(theirs, stacks.name), name=f"rank{rank}", daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours, stacks)


def _collect(ranks: int, began: float, timeout: float, grace: float | None) -> list[Outcome]:
    """Wait for every rank's outcome, for its death, or for the deadline."""
    waiting = {worker.pipe: rank for rank, worker in enumerate(_workers[:ranks])}
    outcomes: dict[int, Outcome] = {}
    deadline = began + timeout
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, connection.Connection)
            rank = waiting.pop(pipe)
            outcomes[rank] = _receive(pipe, rank, began)
            if outcomes[rank].error is not None and grace is not None:
                deadline = min(deadline, time.monotonic() + grace)
    for rank in waiting.values():
        seconds = time.monotonic() - began
        late = WorkerLate(f"rank {rank} of {ranks} had not ended after {seconds:.0f} s")
        late.add_note(_stacks_of(_workers[rank]))
        outcomes[rank] = Outcome(rank, error=late, seconds=seconds)
    return [outcomes[rank] for rank in range(ranks)]


def _stacks_of(worker: Worker) -> str:
    """The Python stacks of all threads of a worker that does not answer."""
    worker.stacks.truncate(0)
    assert worker.process.pid is not None
    try:
        os.kill(worker.process.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "the process has ended"
    time.sleep(1)
    return f"{worker.process.name} is at\n{_written(worker)}"


def _written(worker: Worker) -> str:
    worker.stacks.seek(0)
    return worker.stacks.read()


def _receive(pipe: connection.Connection, rank: int, began: float) -> Outcome:
    try:
        answer: Answer = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        process = _workers[rank].process
        process.join()
        died = WorkerDied(f"rank {rank} died with exit code {process.exitcode}")
        died.add_note(_written(_workers[rank]) or "the process left no stacks of its threads")
        return Outcome(rank, error=died, seconds=time.monotonic() - began)
    _seconds_of_ranks.append(answer.cpu_seconds)
    if answer.error is not None:
        answer.error.add_note(f"on rank {rank}:\n{answer.trace}")
    return Outcome(rank, answer.value, answer.error, answer.ended - began)


def _serve(pipe: connection.Connection, stacks: str) -> None:
    """A worker's life: answer one task after another until the pipe closes."""
    with Path(stacks).open("a") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        faulthandler.enable(file, all_threads=True)
        _answer_all(pipe)


def _answer_all(pipe: connection.Connection) -> None:
    gc.freeze()  # the collection after each task passes over what the modules hold
    gc.set_threshold(*COLLECTED)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    Thread(target=_die_with_parent, daemon=True).start()
    before = 0.0
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        pipe.send_bytes(_answer(message, before))
        before = cpu_seconds()


def _die_with_parent() -> None:
    """End at once when the parent has ended, also from the middle of a task that hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _answer(message: bytes, before: float) -> bytes:
    """Run a pickled `Task`; a pickled `Answer`, whatever happens. `before`: CPU seconds when the last answer was sent."""
    try:
        task: Task = pickle.loads(message)
        with _group(task), warnings.catch_warnings(), _environment():
            warnings.filters[:] = task.filters
            answer = _attempt(task)
        return pickle.dumps(replace(answer, value=on_cpu(answer.value), cpu_seconds=cpu_seconds() - before))
    except BaseException as error:
        return pickle.dumps(_failed(error))


@contextmanager
def _group(task: Task) -> Iterator[None]:
    """The default process group of one task; when it ends, ranks that wait for this one are woken by an error."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(task.rank % torch.cuda.device_count())
    with patch.dict(os.environ, TORCH_DIST_INIT_BARRIER="1"):  # a rank that ends at once would fail those that still connect
        dist.init_process_group(
            BACKEND,
            init_method=f"file://{task.store}",
            rank=task.rank,
            world_size=task.ranks,
            timeout=timedelta(seconds=task.timeout),
        )
    try:
        yield
    finally:
        gc.collect()  # a pipeline is full of cycles, and holds the group's connections open
        if dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()


@contextmanager
def _environment() -> Iterator[None]:
    """The environment variables of one task; afterwards they are as before."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _forget_meshes() -> None:
    """Clear torch's caches of sharded tensors: an equal mesh of the next call would get the groups of this one."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        debug._clear_sharding_prop_cache()
        _redistribute._gen_transform_infos.cache_clear()
        if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # torch 2.15
            _redistribute.clear_redistribute_planner_cache()


def _attempt(task: Task) -> Answer:
    """Call the function; the time is taken before the group ends, so that the first to fail is known."""
    torch.manual_seed(0)
    try:
        return Answer(task.fn(task.rank, *task.args), ended=time.monotonic())
    except BaseException as error:
        return _failed(error)


def _failed(error: BaseException) -> Answer:
    """An exception as an answer: the exception itself if it survives pickling, else a RuntimeError that names it."""
    ended, trace = time.monotonic(), "".join(format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.__traceback__ = error.__context__ = error.__cause__ = None  # their frames hold the group, and do not pickle
    return Answer(error=error, trace=trace, ended=ended)
