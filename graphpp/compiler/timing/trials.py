"""Time stage programs on made-up inputs, with gradients that add up as in a step.

Made-up floating-point values are random between 0 and 0.05 (valid as probabilities, and under roots), integers 0 (valid as any
index), booleans True.

Inputs of equal layout share memory among programs, and so do gradient sums: all programs together need about twice the memory
of the largest. Saved and received values are copied before each run; then other memory is written, so that the core's own cache
does not contain them, as in a step.
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
from graphpp.runtime import program
from graphpp.runtime.gradients.accumulate import Accumulator, FusedAccumulator, MicrobatchSink
from graphpp.runtime.program import Program
from graphpp.streams import wait_for_device

_ELSEWHERE = 6 << 20  # bytes: more than a core's own cache, less than the shared one


@contextlib.contextmanager
def apart(device: torch.device) -> Iterator[None]:
    """A context without autograd and autocast, which restores the random states: a custom operator may draw numbers."""
    state, gpu = random.getstate(), device.type == "cuda"
    modes = torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False)  # the first enables grad
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
        torch.cuda.empty_cache()  # frees the made-up tensors


class Trial:
    """One program with made-up inputs; gradients accumulate as over the microbatches of a step."""

    def __init__(self, item: Program, graph: fx.Graph, values: _Values, sums: _Values, elsewhere: torch.Tensor) -> None:
        """`elsewhere`: memory that no program reads."""
        self._program, self._device, self._elsewhere, self._runs = item, values.device, elsewhere, 0
        self._values = values.of([node.meta["val"] for node in graph.find_nodes(op="placeholder")])
        results: Any = graph.output_node().args[0]
        self._gradients = {at: role.fqn for at, role in enumerate(item.outputs) if isinstance(role, program.Gradient)}
        shared = {fqn for at, fqn in self._gradients.items() if at in item.shared}
        self._sums = (FusedAccumulator if item.fused else Accumulator)(self._gradients.values(), shared)
        examples = sums.of([results[at].meta["val"] for at in self._gradients], contiguous=True)
        self._sums.start(dict(zip(self._gradients.values(), examples, strict=True)))

    def seconds(self) -> float:
        """Run the program once, with copies of the values that it reads last and frees; returns the seconds."""
        last = [isinstance(role, program.Saved | program.Received) for role in self._program.inputs]
        arguments = [_copy(value) if freed else value for value, freed in zip(self._values, last, strict=True)]
        if any(last):
            self._elsewhere.add_(1)
        sink = [MicrobatchSink(self._sums, self._runs, self._gradients)] if self._gradients else []
        self._runs += 1
        wait_for_device(self._device)
        began = time.perf_counter()
        self._program.run(arguments, *sink)
        wait_for_device(self._device)
        return time.perf_counter() - began


def _copy(value: Any) -> Any:
    """A copy of a tensor with its layout and own memory; other values are returned as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    memory = value.untyped_storage().clone()
    return value.new_empty(0).set_(memory, value.storage_offset(), value.shape, value.stride())


@dataclass
class _Values:
    """Made-up inputs. Programs share tensors of equal layout; the inputs of one program never share memory."""

    device: torch.device
    _tensors: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def of(self, examples: Iterable[Any], contiguous: bool = False) -> list[Any]:
        """A tensor for each example tensor (`contiguous`, or with its strides), and a number for each size or key."""
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
        """A new tensor of this layout; its elements may overlap."""
        elements = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1 if all(shape) else 0
        if dtype.is_floating_point or dtype.is_complex:
            draw = torch.Generator(self.device).manual_seed(0)
            memory = torch.empty(elements, device=self.device).uniform_(0.0, 0.05, generator=draw).to(dtype)
        else:
            memory = torch.full((elements,), dtype == torch.bool, dtype=dtype, device=self.device)
        return memory.as_strided(shape, stride)


def warmed_up(items: Sequence[tuple[Program, fx.Graph]], device: torch.device) -> list[Trial]:
    """A trial of each program, which has run once."""
    values, sums = _Values(device), _Values(device)
    elsewhere = torch.zeros(_ELSEWHERE, dtype=torch.uint8, device=device)
    trials = []
    for item, graph in items:
        trials.append(Trial(item, graph, values, sums, elsewhere))
        trials[-1].seconds()
    return trials


def medians(trials: Sequence[Trial], rounds: int) -> list[float]:
    """The median seconds of each trial over `rounds` rounds."""
    found: list[list[float]] = [[] for _ in trials]
    with working("timing layers", rounds) as step:
        for _ in range(rounds):
            for trial, seconds in zip(trials, found, strict=True):
                seconds.append(trial.seconds())
            step()
    return list(map(median, found))
