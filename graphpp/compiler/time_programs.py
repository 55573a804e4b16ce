"""Time stage programs on this device without a pipeline: each distinct program alone, with made-up values for its inputs.

Contract
    in   programs and their graphs; the device, the ranks that time together, the cache, and an estimate
    out  the seconds of each program, equal on all of these ranks
    Programs with the same operations on inputs of the same layout are timed once: 32 equal layers cost as much time as one.
    All ranks time the same program at the same time, since they share the memory of their machine in a step too. The seconds
    of a program are the mean over the ranks of each rank's median.
    Seconds that the cache of the first rank has are not measured again. A key of the cache names the program, the device, the
    number of threads and the version of torch.

Made-up values: floating numbers are small and random, integers 0 (a valid index everywhere), booleans True. Where sizes
depend on data, or a program raises with made-up values, the estimate counts for all programs, and a line of the log says so.
"""

from __future__ import annotations

import json
import logging
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import torch
from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp.cache.disk_cache import DiskCache
from graphpp.errors import MismatchError
from graphpp.parallel.agreement import Agreement
from graphpp.passes.graph.region import RegionCall
from graphpp.passes.provenance import ProgramGraphs
from graphpp.passes.stage.outline_regions import graph_key
from graphpp.planner.segments import ProgramSeconds
from graphpp.progress import working
from graphpp.runtime.gradients.accumulate import Accumulator, FusedAccumulator, MicrobatchSink
from graphpp.runtime.program import Gradient, Phase, PipelineProgram, Program

_LOG = logging.getLogger("graphpp")
_TABLE = "program_seconds.json"  # in the cache
_SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 10.0, 5, 25  # all programs are timed for about so long, in so many rounds


@dataclass(frozen=True)
class Stopwatch:
    """Where programs are timed. `agreement`: of the ranks that time together, which all call it with the same programs.

    `cache`: None for programs that call compiled regions, whose names say nothing of the compiler.
    `estimate` gives the seconds of programs that cannot be timed.
    """

    device: torch.device
    agreement: Agreement
    cache: DiskCache | None
    estimate: Callable[[PipelineProgram, ProgramGraphs], ProgramSeconds]

    def __call__(self, lowered: PipelineProgram, sources: ProgramGraphs) -> ProgramSeconds:
        """The seconds of all programs. Raises `MismatchError` where the ranks have different numbers of programs."""
        places: dict[str, list[tuple[int, Phase]]] = {}
        items: dict[str, Program] = {}
        for stage in lowered.stages:
            for phase, item in stage.programs.items():
                key = _key(item, sources)
                places.setdefault(key, []).append((stage.index, phase))
                items.setdefault(key, item)
        if not self.agreement.same(str(len(items)).encode()):
            raise MismatchError("the ranks have different numbers of programs to time: compile the same model on all of them")
        if any(_depends_on_data(sources.of(item).graph) for item in items.values()):
            _LOG.info("layers are not timed but estimated: sizes of the graph depend on data")
            return self.estimate(lowered, sources)
        seconds = self._seconds(items, sources)
        if seconds is None:
            return self.estimate(lowered, sources)
        return {place: each for key, each in zip(items, seconds, strict=True) for place in places[key]}

    def _seconds(self, items: dict[str, Program], sources: ProgramGraphs) -> list[float] | None:
        """The seconds of each item, from the cache or measured; None where a program raises."""
        names = [self._name(key) for key in items]
        known = json.loads(self.agreement.from_first(lambda: json.dumps(self._kept(names)).encode()))
        new = [at for at, seconds in enumerate(known) if seconds is None]
        programs = list(items.values())
        measured = self._measured([(programs[at], sources.of(programs[at]).graph) for at in new])
        if measured is None:
            return None
        for at, seconds in zip(new, measured, strict=True):
            known[at] = seconds
        if new and self.cache is not None:
            self.cache.write(_TABLE, {names[at]: repr(known[at]) for at in new})
        return list(map(float, known))

    def _kept(self, names: Iterable[str]) -> list[float | None]:
        table = self.cache.read(_TABLE) if self.cache is not None else {}
        return [float(table[name]) if name in table else None for name in names]

    def _name(self, key: str) -> str:
        of_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if of_gpu else platform.processor() or platform.machine()
        return f"{key} {device} {torch.get_num_threads()} {torch.__version__}"

    def _measured(self, items: Sequence[tuple[Program, fx.Graph]]) -> list[float] | None:
        """The seconds of each program. All run in turn, round by round, so that no program finds its data in a cache.

        None where a program raises on any rank.
        """
        if not items:
            return []
        trials = self._warmed_up(items)
        if trials is None:
            return None
        once = torch.tensor([sum(trial.seconds() for trial in trials)], dtype=torch.float64)
        rounds = round(_SECONDS / float(self.agreement.of_all(once).max()))
        rounds = min(max(rounds, _LEAST_ROUNDS), _MOST_ROUNDS)
        found: list[list[float]] = [[] for _ in trials]
        with working("timing layers", rounds) as step:
            for _ in range(rounds):
                for trial, seconds in zip(trials, found, strict=True):
                    seconds.append(trial.seconds())
                step()
        mine = torch.tensor(list(map(median, found)), dtype=torch.float64)
        return [fmean(each) for each in self.agreement.of_all(mine).T.tolist()]

    def _warmed_up(self, items: Sequence[tuple[Program, fx.Graph]]) -> list[_Trial] | None:
        """A trial of each program, after a first run; None where one raises on any rank."""
        trials, values, failed = list[_Trial](), _Values(self.device), 0
        try:
            for item, graph in items:
                trials.append(_Trial(item, graph, values))
                trials[-1].seconds()
        except Exception as error:  # a kernel may refuse made-up values, and memory may end
            reason = (str(error).splitlines() or [""])[0]
            _LOG.warning("layers are not timed but estimated: made-up values end in %s: %s", type(error).__name__, reason)
            failed = 1
        return None if self.agreement.largest(torch.tensor([failed], dtype=torch.int64)).item() else trials


def _key(item: Program, sources: ProgramGraphs) -> str:
    """A name of a program's operations and input layouts, and of the results that are gradients, which are added up."""
    gradients = [index for index, role in enumerate(item.outputs) if isinstance(role, Gradient)]
    graph = sources.of(item).graph
    regions = [node.target.region.key for node in graph.nodes if isinstance(node.target, RegionCall)]
    return f"{graph_key(graph)} {gradients} {item.fused} {regions}"


def _depends_on_data(graph: fx.Graph) -> bool:
    return any(has_unknown_size(node.meta["val"]) for node in graph.nodes if "val" in node.meta)


# ---------------------------------------------------------------------------------- one program


class _Trial:
    """One program with made-up inputs; its gradients add up to sums, as over the microbatches of a step."""

    def __init__(self, item: Program, graph: fx.Graph, values: _Values) -> None:
        self._run, self._device = item.run, values.device
        self._inputs = values.of([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
        self._fqns = {index: role.fqn for index, role in enumerate(item.outputs) if isinstance(role, Gradient)}
        shared = {self._fqns[index] for index in item.shared if index in self._fqns}
        self._sums = (FusedAccumulator if item.fused else Accumulator)(self._fqns.values(), shared)
        self._runs = 0

    def seconds(self) -> float:
        """The seconds of one run."""
        sink = MicrobatchSink(self._sums, self._runs, self._fqns)
        arguments, self._runs = list(self._inputs), self._runs + 1
        _synchronize(self._device)
        began = time.perf_counter()
        results = self._run(arguments, sink) if self._fqns else self._run(arguments)
        for index in self._fqns:
            if results[index] is not None:  # a gradient that is another result too
                sink(index, results[index])
        _synchronize(self._device)
        return time.perf_counter() - began


@dataclass
class _Values:
    """Made-up inputs. Programs share the tensors of one layout; the inputs of one program have memory of their own each."""

    device: torch.device
    _tensors: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def of(self, examples: Iterable[Any]) -> list[Any]:
        """A value for each placeholder's example: a tensor, or a number for a size or a random key."""
        taken: Counter[Any] = Counter()
        values: list[Any] = []
        for example in examples:
            if not isinstance(example, torch.Tensor):
                values.append(hint(example) if isinstance(example, SYMBOLIC) else example or 0)
                continue
            layout = tuple(map(hint, example.shape)), tuple(map(hint, example.stride())), example.dtype
            known = self._tensors.setdefault(layout, [])
            if taken[layout] == len(known):
                known.append(self._made_up(*layout))
            values.append(known[taken[layout]])
            taken[layout] += 1
        return values

    def _made_up(self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this layout, in memory of its own; its elements may overlap."""
        elements = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
        if dtype.is_floating_point or dtype.is_complex:
            draw = torch.Generator(self.device).manual_seed(0)
            memory = torch.empty(elements, device=self.device).normal_(std=0.02, generator=draw).to(dtype)
        else:
            memory = torch.full((elements,), dtype == torch.bool, dtype=dtype, device=self.device)
        return memory.as_strided(shape, stride)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
