"""Runs of one stage program with made-up values for its inputs, and their seconds.

Contract
    in   programs, their graphs, the device
    out  `warmed_up` gives a trial of each program, which has run once; `medians` runs them in turn and gives their seconds
    Within `apart` programs run as in a step, without autograd and autocast. Afterwards the random states are as before.

Made-up values: floating numbers are random between 0 and 0.05 (so they are probabilities too, and have roots), integers 0 (a
valid index everywhere), booleans True. Inputs of equal layout share memory among programs, and so do sums of gradients: all
programs together need about as much memory as the largest.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import fx

from graphpp._torch.symbols import SYMBOLIC, hint
from graphpp.progress import working
from graphpp.runtime.gradients.accumulate import Accumulator, FusedAccumulator, MicrobatchSink
from graphpp.runtime.program import Gradient, Program


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A context as in a step, without autograd and autocast, which ends with the random states of before.

    A custom operator may draw from the user's generators, and it runs more or less often, as the cache has seconds or not.
    """
    state, gpu = random.getstate(), device.type == "cuda"
    modes = torch.no_grad(), torch.inference_mode(False), torch.autocast(device.type, enabled=False)
    with contextlib.ExitStack() as stack:
        for mode in (*modes, torch.random.fork_rng([device] if gpu else [])):
            stack.enter_context(mode)
        if gpu:
            stack.enter_context(torch.cuda.device(device))
        try:
            yield
        finally:
            random.setstate(state)
    if gpu:
        torch.cuda.empty_cache()  # the made-up tensors' memory, for other processes and for larger tensors


# ---------------------------------------------------------------------------------- one program


class Trial:
    """One program with made-up inputs; its gradients add up to sums, as over the microbatches of a step."""

    def __init__(self, item: Program, graph: fx.Graph, values: _Values, sums: _Values) -> None:
        self._run, self._device = item.run, values.device
        self._inputs = values.of([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
        self._fqns = {index: role.fqn for index, role in enumerate(item.outputs) if isinstance(role, Gradient)}
        shared = {self._fqns[index] for index in item.shared if index in self._fqns}
        self._sums = (FusedAccumulator if item.fused else Accumulator)(self._fqns.values(), shared)
        results = graph.output_node().args[0]
        examples = [results[index].meta["val"] for index in self._fqns]  # type: ignore[index, union-attr]
        self._sums.start(dict(zip(self._fqns.values(), sums.of(examples, contiguous=True), strict=True)))
        self._runs = 0

    def seconds(self) -> float:
        """Run the program once; returns the seconds."""
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

    def of(self, examples: Iterable[Any], contiguous: bool = False) -> list[Any]:
        """A value for each example: a tensor (`contiguous`, or laid out as the example), or a number for a size or a key."""
        taken: Counter[Any] = Counter()
        values: list[Any] = []
        for example in examples:
            if not isinstance(example, torch.Tensor):
                values.append(hint(example) if isinstance(example, SYMBOLIC) else example or 0)
                continue
            shape = tuple(map(hint, example.shape))
            stride = torch.empty(shape, device="meta").stride() if contiguous else tuple(map(hint, example.stride()))
            layout = shape, stride, example.dtype
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
            memory = torch.empty(elements, device=self.device).uniform_(0.0, 0.05, generator=draw).to(dtype)
        else:
            memory = torch.full((elements,), dtype == torch.bool, dtype=dtype, device=self.device)
        return memory.as_strided(shape, stride)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------- all programs


def warmed_up(items: Sequence[tuple[Program, fx.Graph]], device: torch.device) -> list[Trial]:
    """A trial of each program, after a first run."""
    values, sums = _Values(device), _Values(device)
    trials = []
    for item, graph in items:
        trials.append(Trial(item, graph, values, sums))
        trials[-1].seconds()
    return trials


def medians(trials: Sequence[Trial], rounds: int) -> list[float]:
    """The median seconds of each trial over so many rounds."""
    found: list[list[float]] = [[] for _ in trials]
    with working("timing layers", rounds) as step:
        for _ in range(rounds):
            for trial, seconds in zip(trials, found, strict=True):
                seconds.append(trial.seconds())
            step()
    return list(map(median, found))
