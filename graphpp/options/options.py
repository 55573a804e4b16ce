"""Every option of `graphpp.compile` and `graphpp.verify`, declared once.

`docs/options.md` and `docs/options/` are printed from these declarations (`python -m graphpp.options.document docs`). `mesh=`
is read by `parallel/place.py` instead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from graphpp.errors import ScheduleError
from graphpp.options.backend import BACKEND_FORMS, Backend, BackendLike, Eager, describe_backend, read_backend
from graphpp.options.debug import Debug, DebugLike, read_debug
from graphpp.options.gradients import Gradients, GradientsLike, read_gradients
from graphpp.options.memory import Memory, MemoryLike, read_memory
from graphpp.options.microbatches import Microbatches, MicrobatchesLike, read_microbatches
from graphpp.options.option import Group, Option, read_folder
from graphpp.options.parallel import Parallel, ParallelLike, read_parallel
from graphpp.options.split import Split, describe_split, read_split
from graphpp.schedules.generate.read import ScheduleFunction, ScheduleLike, load_schedule
from graphpp.schedules.table.schedule import Schedule


def _describe_schedule(schedule: Schedule | str | ScheduleFunction) -> list[str]:
    """The schedule as text, equal on all ranks: a name, all rows of a table, or the name of a function."""
    if isinstance(schedule, Schedule | str):
        return str(schedule).splitlines()
    return [f"the function {getattr(schedule, '__qualname__', type(schedule).__name__)}"]


@dataclass(frozen=True)
class Options(Group):
    """The options of one pipeline, read. Raises `GraphPPError` (`SplitError`, `ScheduleError`, `BatchError`)."""

    split: Option[Split, Split] = Option(
        None,
        read=read_split,
        describe=describe_split,
        takes='FQNs, a list of FQNs per stage, a number of stages, `split_points(...)`, a `Layout`, "auto"',
        about="Where stages start. None: one stage per slot of the schedule, with equal numbers of layers. \"auto\": so many "
        "stages, which start at the module calls that give the fastest step within `memory.cap`: each distinct layer "
        "is timed on this device (or `parallel.op_costs` gives the seconds of each operation), and the schedule is simulated.",
    )
    schedule: Option[ScheduleLike, Schedule | str | ScheduleFunction] = Option(
        "auto",
        read=load_schedule,
        describe=_describe_schedule,
        takes="a name, a CSV file in torch's format, a `Schedule`, rows of action strings, a function (ranks, stages, "
        "microbatches) -> table",
        about='The order in which a rank runs its stages and microbatches. "auto": a plain loop in one process, 1F1B for one '
        "stage a rank, Interleaved1F1B for several. Names: `graphpp.schedules.SCHEDULES`.",
    )
    microbatches: Option[MicrobatchesLike, Microbatches] = Option(
        None,
        read=read_microbatches,
        takes="a `Microbatches`, a positive integer up to 2**16",
        about="Into how many microbatches `step` cuts a batch, and along which dimensions of its tensors.",
    )
    parallel: Option[ParallelLike, Parallel] = Option(
        None,
        read=read_parallel,
        takes="a `Parallel`, a device",
        about="Where a rank runs, and how collectives overlap with computation.",
    )
    backend: Option[BackendLike, Backend] = Option(
        "eager",
        read=read_backend,
        describe=describe_backend,
        takes=BACKEND_FORMS,
        about='Who runs the operations of a stage. "eager": torch\'s operators one by one, bit-equal to a plain loop. '
        '"inductor": equal layers are compiled once and kept in a cache folder for other ranks and later runs; the same '
        "numbers but for rounding. A function: as `torch.compile(backend=)` takes it. Operations that cannot be compiled run "
        "eagerly, with a warning.",
    )
    memory: Option[MemoryLike, Memory] = Option(
        None,
        read=read_memory,
        takes="a `Memory`, or a form of `memory.recompute`",
        about="Which activations are alive between forward and backward.",
    )
    gradients: Option[GradientsLike, Gradients] = Option(
        None,
        read=read_gradients,
        takes='a `Gradients`, "mean", "sum"',
        about="How losses and gradients add up over the microbatches of a step.",
    )
    debug: Option[DebugLike, Debug] = Option(
        None,
        read=read_debug,
        takes="a `Debug`, the path of a folder for dumps",
        about="Dumps, and how many captured graphs are kept.",
    )
    artifact: Option[str | os.PathLike[str] | None, Path | None] = Option(
        None,
        read=read_folder,
        describe=None,  # only the first rank uses the folder
        takes="the path of a folder",
        about="The folder in which the first start saves its captured graphs, and from which a later start loads those of an "
        "unchanged model ([Start-up](cache.md#captured-graphs)). None: each start captures.",
    )

    def __post_init__(self) -> None:
        if isinstance(self.schedule, Schedule):
            table, count = self.schedule, self.microbatches.count
            if count not in (None, table.microbatches):
                raise ScheduleError(f"microbatches={count}, but the schedule {table.name!r} is for {table.microbatches}")
            object.__setattr__(self, "microbatches", replace(self.microbatches, count=table.microbatches))

    @property
    def fused(self) -> bool:
        """Whether matrix products accumulate into gradient sums: as given, else under every backend but eager."""
        return not isinstance(self.backend, Eager) if self.gradients.fused is None else self.gradients.fused

    @property
    def hoists_all(self) -> bool:
        """Whether all step-invariant values are computed once a step: under eager, since a compiler fuses cheap ones."""
        return isinstance(self.backend, Eager)
