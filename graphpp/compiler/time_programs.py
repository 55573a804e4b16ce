"""Time stage programs on this device for `split="auto"`: each distinct program alone, on made-up inputs.

- Programs with the same operations and input layouts are timed once.
- All ranks time the same program at once, since ranks of a machine share memory bandwidth in a step too. The result, equal on
  all ranks, is the mean over the first row of ranks (`RankTree`; all of them if they are 16 or fewer) of each rank's median.
- Results are cached by the first rank. The key names program, device, threads, ranks, torch's version, precision and
  determinism.
- If sizes depend on data, or a program raises on made-up values, all programs are estimated, with a warning. If programs
  contain collectives, the error is raised instead, on all ranks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import torch
from torch import fx

from graphpp._torch.numbers_of_data import has_unknown_size
from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp.backends.kernels import processor_name
from graphpp.cache.disk_cache import DiskCache
from graphpp.compiler.timing.trials import apart, medians, warmed_up
from graphpp.errors import MismatchError
from graphpp.log import logger
from graphpp.parallel.agreement import Agreement
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.provenance import ProgramGraphs
from graphpp.passes.stage.region_key import graph_key
from graphpp.planner.segments import ProgramSeconds
from graphpp.runtime.program import Gradient, Phase, PipelineProgram, Program
from graphpp.runtime.random_keys import dropout_mask, seeded

T = TypeVar("T")

_LOG = logger(__name__)
_TABLE = "action_seconds.json"  # in the cache
_SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 10.0, 5, 25  # total time of the measurement, limits of its rounds


@dataclass(frozen=True)
class Stopwatch:
    """Times programs. `agreement`: the ranks that time together, each with the same programs.

    `estimate` returns the seconds of programs that cannot be timed.
    """

    device: torch.device
    agreement: Agreement
    cache: DiskCache
    estimate: Callable[[PipelineProgram, ProgramGraphs], ProgramSeconds]

    def __call__(self, lowered: PipelineProgram, sources: ProgramGraphs) -> ProgramSeconds:
        """The seconds of all programs. Raises `MismatchError` if the ranks have different numbers of programs."""
        places: dict[str, list[tuple[int, Phase]]] = {}
        items: dict[str, tuple[Program, fx.Graph]] = {}
        for stage in lowered.stages:
            for phase, item in stage.programs.items():
                graph = sources.of(item).graph
                key = _key(item, graph)
                places.setdefault(key, []).append((stage.index, phase))
                items.setdefault(key, (item, graph))
        if not self.agreement.same(str(len(items)).encode()):
            raise MismatchError("the ranks have different numbers of programs to time: compile the same model on all of them")
        if any(has_unknown_size(node.meta["val"]) for _, graph in items.values() for node in graph.nodes if "val" in node.meta):
            _LOG.warning("layers are not timed but estimated: sizes of the graph depend on data")
            return self.estimate(lowered, sources)
        try:
            with apart(self.device):
                seconds = self._seconds(items)
        except _CannotRunError:
            return self.estimate(lowered, sources)
        return {place: each for key, each in zip(items, seconds, strict=True) for place in places[key]}

    def _seconds(self, items: dict[str, tuple[Program, fx.Graph]]) -> list[float]:
        """The seconds of each item, from the cache or measured."""
        names = [self._name(key) for key in items]
        known = json.loads(self.agreement.from_first(lambda: json.dumps(self._cached(names)).encode()))
        new = [at for at, seconds in enumerate(known) if seconds is None]
        programs = list(items.values())
        if new:
            for at, seconds in zip(new, self._measured([programs[at] for at in new]), strict=True):
                known[at] = seconds
            self.cache.write(_TABLE, {names[at]: repr(known[at]) for at in new})
        return list(map(float, known))

    def _cached(self, names: Sequence[str]) -> list[float | None]:
        table = self.cache.read(_TABLE)
        return [_seconds_in(table.get(name)) for name in names]

    def _name(self, key: str) -> str:
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else processor_name()
        counts = f"{torch.get_num_threads()} threads, {self.agreement.ranks} ranks"
        return f"{key} {device}, {counts}, torch {torch.__version__}, {_settings()}"

    def _measured(self, items: Sequence[tuple[Program, fx.Graph]]) -> list[float]:
        """The seconds of each program. Programs run in turn, round by round, so that none finds its data in a cache."""
        together = any(is_collective(node) for _, graph in items for node in graph.nodes)
        trials = self._on_all_ranks(lambda: warmed_up(items, self.device), together)
        once = self._on_all_ranks(lambda: sum(trial.seconds() for trial in trials), together)
        slowest = self.agreement.largest([round(1e9 * once)])[0] / 1e9
        rounds = min(max(round(_SECONDS / slowest), _LEAST_ROUNDS), _MOST_ROUNDS)
        mine = torch.tensor(self._on_all_ranks(lambda: medians(trials, rounds), together), dtype=torch.float64)
        means = self.agreement.of_row(mine).mean(0).tolist()
        return list(map(float, json.loads(self.agreement.from_first(lambda: json.dumps(means).encode()))))

    def _on_all_ranks(self, work: Callable[[], T], together: bool) -> T:
        """The result of `work`; raises `_CannotRunError` on all ranks if it raises on any. Called by all ranks.

        `together`: the programs have collectives, so the ranks cannot communicate again after an error, which is raised.
        """
        found = list[T]()
        try:
            found.append(work())
        except Exception as error:  # a kernel may refuse made-up values, or memory may run out
            if together and self.agreement.several:
                raise
            reason = (str(error).splitlines() or [""])[0]
            _LOG.warning("layers are not timed but estimated: made-up values end in %s: %s", type(error).__name__, reason)
        if any(self.agreement.largest([not found])):
            raise _CannotRunError
        return found[0]


class _CannotRunError(Exception):
    """A program cannot run on made-up values."""


def _seconds_in(text: str | None) -> float | None:
    """The positive seconds in a cache entry; None for a missing or invalid entry."""
    try:
        seconds = float(text or "nan")
    except ValueError:
        return None
    return seconds if 0 < seconds < inf else None


def _settings() -> str:
    """The settings of torch that decide which kernel is fastest."""
    backends: Any = torch.backends
    exact = torch.are_deterministic_algorithms_enabled()
    precision = backends.cuda.matmul.fp32_precision, backends.cudnn.conv.fp32_precision, backends.mkldnn.matmul.fp32_precision
    return f"precision {precision}, deterministic {exact}, benchmark {backends.cudnn.benchmark}"


def _key(item: Program, graph: fx.Graph) -> str:
    """Identifies a program's operations, input layouts, and which results are accumulated gradients."""
    gradients = [index for index, role in enumerate(item.outputs) if isinstance(role, Gradient)]
    sizes = [hint(size) for node in graph.find_nodes(op="placeholder") for size in _symbolic_sizes(node.meta["val"])]
    return f"{graph_key(graph, _without_number)} {gradients} {item.fused} {sizes}"


def _without_number(node: fx.Node) -> Sequence[Any]:
    """A node's arguments; for a random operator without its number, which differs between equal layers."""
    return (node.args[0], *node.args[2:]) if node.target in (seeded, dropout_mask) else node.args


def _symbolic_sizes(value: Any) -> list[Any]:
    """The symbolic sizes and strides of an input, or the input itself if it is a symbolic size."""
    sizes = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else (value,)
    return [size for size in sizes if isinstance(size, SYMBOLIC)]
