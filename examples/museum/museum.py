"""Shared by the cases of the museum: ranks in child processes, eager's numbers, torch's pipeline, and the two lines of output.

A case defines `theirs`, which runs the way of the complaint and says in one line what happened, and `ours`, which asserts
graphpp's numbers. `show(theirs, ours)` prints both lines and exits with 1 if `ours` is not as claimed. A line of `theirs` that
begins with "right" is printed as "no longer fails". Each group has a link to this file, so a case runs alone:
`python examples/museum/numbers/tied_weights.py`.
"""

import importlib.util
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from multiprocessing import connection
from pickle import dumps, loads
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

import graphpp

Loss = Callable[[Any, Any], Tensor]
Gradients = dict[str, Tensor | None]
_RANKS = multiprocessing.get_context("fork")  # on the CPU; a rank need not import torch again
_MOST_SHOWN = 150  # characters of an error


# --------------------------------------------------------------------------------------------------- the two lines


def show(theirs: Callable[[], str], ours: Callable[[], str]) -> None:
    """Print what happens their way and ours. Exits with 1 if ours raises."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    print("theirs:", _one_line(_measured(theirs)), flush=True)
    try:
        print("ours:", _one_line(ours()), flush=True)
    except Exception as error:
        traceback.print_exc()
        print("ours: NOT AS CLAIMED:", said(error), flush=True)
        sys.exit(1)


def _measured(theirs: Callable[[], str]) -> str:
    try:
        outcome = theirs()
    except RankError as error:
        return str(error)
    except Exception as error:
        return f"raises {said(error)}"
    return f"no longer fails: {outcome.removeprefix('right: ')}" if outcome.startswith("right") else outcome


def said(error: BaseException | str) -> str:
    """An error in one line: its type and the start of its message, without the folders of files."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return _one_line(text, _MOST_SHOWN)


def _one_line(text: str, most: int = 260) -> str:
    line = re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", " ".join(text.split()))
    line = re.sub(r"\[\w+\.cc:\d+\] ", "", re.sub(r" ?\[127\.0\.0\.1\]:\d+", "", line))  # of gloo, other in each run
    return line if len(line) <= most else f"{line[:most]}…"


def not_run(package: str, why: str = "this case does not run it") -> str:
    """What `theirs` says of a package that this machine lacks, or that cannot run here."""
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed, not run"
    return f"{package} {version(package)}: {why}, not run"


def refused(call: Callable[[], Any], *words: str) -> str:
    """graphpp's error of a call, which must name all `words`."""
    try:
        call()
    except graphpp.GraphPPError as error:
        missing = [word for word in words if word not in str(error)]
        assert not missing, f"the error does not say {missing}: {error}"
        return f"refused: {said(str(error))}"
    raise AssertionError("not refused")


# --------------------------------------------------------------------------------------------------------- numbers


def gradients(model: nn.Module) -> Gradients:
    """Copies of the gradients by FQN; None where a parameter has none."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def eager(model: nn.Module, loss: Loss, x: Tensor, y: Any, microbatches: int) -> Gradients:
    """The gradients of a plain loop over the microbatches in this process, with a copy of the model."""
    model = deepcopy(model)
    for piece, target in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
        (loss(model(piece), target) / microbatches).backward()
    return gradients(model)


def error(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None]) -> tuple[float, str]:
    """The largest relative difference of a tensor in the 2-norm, and the name of this tensor; inf where one is missing."""
    assert got, "nothing to compare"
    found = [(_difference(value, want[name]), name) for name, value in got.items()]
    return max(found)


def _difference(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return 0.0 if got is want else float("inf")
    if torch.equal(got, want):
        return 0.0
    distance = (got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)
    return float("inf") if distance.isnan() else distance.item()


def compare(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], close: float = 1e-6) -> str:
    """For `theirs`: "right" or "wrong", and by how much."""
    distance, name = error(got, want)
    if distance <= close:
        return f"right: {_equal(distance)}"
    none = sorted(name for name, value in got.items() if value is None and want[name] is not None)
    if none:
        return f"wrong, silently: no gradient of {', '.join(none[:3])}"
    return f"wrong, silently: {name} differs from eager by {distance:.2g} of its norm"


def equal(got: Mapping[str, Tensor | None], want: Mapping[str, Tensor | None], close: float = 0.0) -> str:
    """For `ours`: asserts that all tensors are equal, bit for bit unless `close` allows a relative difference."""
    distance, name = error(got, want)
    assert distance <= close, f"{name} differs by {distance:.2g} of its norm"
    return _equal(distance)


def _equal(distance: float) -> str:
    return "equal to eager, bit for bit" if distance == 0.0 else f"within {distance:.1g} of eager"


def mlp(layers: int = 4, width: int = 8) -> nn.Sequential:
    """The model of many cases; a stage may start at every layer."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))


def batch(rows: int = 8, width: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `mlp`."""
    drawn = torch.Generator().manual_seed(1)
    return torch.randn(rows, width, generator=drawn), torch.randn(rows, width, generator=drawn)


def own(pipe: graphpp.Pipeline) -> Gradients:
    """The gradients of this rank's parameters."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in pipe.named_parameters()}


# ----------------------------------------------------------------------------------------------- torch's pipeline


def torch_pipeline(
    parts: Sequence[nn.Module], loss: Loss | None, microbatches: int, schedule: str = "Interleaved1F1B", **options: Any
) -> tuple[Any, list[int]]:
    """torch's schedule over stages written by hand, and the indices of this rank's stages. One process has all stages."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    last = len(parts) - 1
    looped, mirrored = range(rank, len(parts), ranks), sorted({rank, last - rank})
    mine = mirrored if schedule in ("ZBVZeroBubble", "DualPipeV") else list(looped)
    stages = [PipelineStage(parts[index], index, len(parts), torch.device("cpu")) for index in mine]
    made = get_schedule_class(schedule)
    single = schedule in ("GPipe", "1F1B")
    return made(stages[0] if single else stages, microbatches, loss_fn=loss, **options), mine


def torch_step(
    parts: Sequence[nn.Module], loss: Loss, x: Tensor, y: Any, microbatches: int, schedule: str = "Interleaved1F1B"
) -> tuple[list[Tensor], list[int]]:
    """One training step of torch's pipeline on this rank: its losses, where the last stage is, and its stages' indices."""
    pipeline, mine = torch_pipeline(parts, loss, microbatches, schedule)
    losses: list[Tensor] = []
    last = len(parts) - 1 in mine
    pipeline.step(*((x,) if 0 in mine else ()), return_outputs=False, **({"target": y, "losses": losses} if last else {}))
    return losses, mine


def named(parts: Iterable[nn.Module], indices: Iterable[int] | None = None) -> Gradients:
    """The gradients of the stages of an `nn.Sequential`, by the names that they have there."""
    parts = list(parts)
    found: Gradients = {}
    for index in range(len(parts)) if indices is None else indices:
        found |= {f"{index}.{name}": value for name, value in gradients(parts[index]).items()}
    return found


# ---------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True)
class Failure:
    """What became of a rank that returned nothing."""

    text: str
    hangs: bool = False


class RankError(RuntimeError):
    """A rank returned nothing; the message says what became of it."""


def ranks(fn: Callable[..., Any], count: int, *args: Any, seconds: float = 120.0) -> list[Any]:
    """The values of `fn(rank, *args)` on `count` ranks joined by gloo; raises if a rank failed."""
    values = outcomes(fn, count, *args, seconds=seconds)
    failed = [value for value in values if isinstance(value, Failure)]
    if failed:
        causes = sorted(failed, key=lambda failure: failure.hangs + ("peer" in failure.text))  # a lost peer is a consequence
        raise RankError(causes[0].text)
    return values


def outcomes(
    fn: Callable[..., Any], count: int, *args: Any, seconds: float = 120.0, timeout: float = 300.0
) -> list[Any]:
    """What `fn(rank, *args)` gave on each of `count` ranks: its value, or a `Failure`. Ranks that are late are killed.

    `timeout`: seconds, of the ranks' process group.
    """
    if dist.is_initialized():  # by a pipeline in this process
        dist.destroy_process_group()
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(fn, rank, count, f"{folder}/store", timeout, args) for rank in range(count)]
        values = _collect(started, seconds)
    for process, _ in started:
        process.kill()
        process.join()
    return values


def _start(
    fn: Callable[..., Any], rank: int, count: int, store: str, timeout: float, args: tuple[Any, ...]
) -> tuple[Any, Any]:
    ours, theirs = _RANKS.Pipe(duplex=False)
    process = _RANKS.Process(target=_run, args=(theirs, fn, rank, count, store, timeout, args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _collect(started: list[tuple[Any, Any]], seconds: float) -> list[Any]:
    values: list[Any] = [Failure(f"hangs: no end within {seconds:g} s", hangs=True)] * len(started)
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(started)}
    connection.wait(list(waiting))  # the clock starts with the first rank that is ready: imports do not count
    end = time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in connection.wait(list(waiting), left):
            try:
                value = loads(pipe.recv_bytes())
            except EOFError:
                value = Failure("the process of a rank dies")
            if not (isinstance(value, str) and value == "ready"):
                values[waiting.pop(pipe)] = value
    return values


def _run(
    pipe: Any, fn: Callable[..., Any], rank: int, count: int, store: str, timeout: float, args: tuple[Any, ...]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate reads them; the file connects the ranks
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=limit)
    dist.barrier()  # a rank that fails at once must not end while another one still connects
    pipe.send_bytes(dumps("ready"))
    try:
        value = fn(rank, *args)
    except Exception as error:
        value = Failure(f"raises {said(error)}")
    pipe.send_bytes(dumps(value))
    if not isinstance(value, Failure):
        time.sleep(600)  # the rank goes on with something else, until it is killed
    os._exit(0)  # without the destructors of process groups whose peers may be gone
