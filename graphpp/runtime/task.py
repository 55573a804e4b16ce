"""One phase of one microbatch on one stage: where its arguments are and where its results go, bound once per runner.

Contract
--------
- `run()` gathers the program's arguments, runs it and files its results. Nothing is looked up by role, rank or phase: that was
  done when the task was made. `arguments`, `take` and `file` are its parts, for whoever runs several programs as one
  (`overlap.py`).
- What a stage on the same rank made is taken from where it was filed; what another rank sends is waited for here, where it
  is read.
- Each value is handed over once and dies when its last reader has run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from graphpp.runtime.gradients.gemm_accumulation import Take
from graphpp.runtime.program import Phase, Program
from graphpp.runtime.transport import Message
from graphpp.runtime.wiring import Wiring

Tensors = list[torch.Tensor]
Source = Callable[[], Sequence[torch.Tensor]]


@dataclass(frozen=True)
class Feed:
    """What a step is given: per microbatch its tensors by path, the seed of its backward, its key for random numbers."""

    inputs: Sequence[Mapping[str, torch.Tensor]]
    seeds: Sequence[torch.Tensor] = ()
    keys: Sequence[int] = ()


@dataclass
class Held:
    """What a stage holds while a step runs: by microbatch, and what crosses its boundaries by direction (F, B) too."""

    device: torch.device
    tensor: Callable[[str], torch.Tensor] | None = None
    feed: Feed | None = None
    arrived: dict[tuple[str, int], Message] = field(default_factory=dict)
    saved: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    leaving: dict[tuple[str, int], Tensors] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)
    metrics: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop everything held per microbatch."""
        for each in (self.arrived, self.saved, self.leaving, self.losses, self.outputs, self.metrics):
            each.clear()


@dataclass(frozen=True)
class Part:
    """Which part of a stage's work a task is. `outliving`: the saved values that are read again after it."""

    wiring: Wiring
    phase: Phase
    microbatch: int
    outliving: frozenset[str]

    @property
    def direction(self) -> str:
        """The way that its results go: up (F) or down (B)."""
        return "B" if self.phase.is_backward else "F"


class Task:
    """Runs one phase of one microbatch."""

    def __init__(self, part: Part, held: Held, source: Source | None, take: Take | None) -> None:
        """`source` gives what arrives from the neighbouring stage, `take` is handed gradients as they are made."""
        self.part, self.take = part, take
        self.program: Program = part.wiring.program
        self._wiring, self._held, self._source = part.wiring, held, source
        self._microbatch, self._outliving = part.microbatch, part.outliving
        self._fed = bool(part.wiring.inputs or part.wiring.seeds or part.wiring.keys)
        self._backward = part.phase.is_backward
        self._leaving = None if part.phase is Phase.WEIGHT_GRAD else (part.direction, part.microbatch)

    def run(self) -> None:
        """Run the program and file its results."""
        run, take = self.program.run, self.take
        self.file(run(self.arguments()) if take is None else run(self.arguments(), take))

    def arguments(self) -> list[Any]:
        """The program's arguments, which are handed over once; waits for what is still to arrive."""
        wiring = self._wiring
        boxed = wiring.bound.copy()
        if self._fed:
            self._give_input(boxed)
        if self._source is not None:
            tensors = self._source()
            for index, place in wiring.received:
                boxed[index] = tensors[place]
        if self._backward:
            self._give_saved(boxed)
        return boxed

    def _give_input(self, boxed: list[Any]) -> None:
        wiring, feed, microbatch = self._wiring, self._held.feed, self._microbatch
        assert feed is not None, "begin() comes first"
        for index, path in wiring.inputs:
            boxed[index] = feed.inputs[microbatch][path].to(self._held.device, non_blocking=True)
        for index in wiring.seeds:
            boxed[index] = feed.seeds[microbatch]
        for index in wiring.keys:
            boxed[index] = feed.keys[microbatch]

    def _give_saved(self, boxed: list[Any]) -> None:
        saved = self._held.saved.pop(self._microbatch, {})
        for index, name in self._wiring.saved:
            boxed[index] = saved[name]
        if self._outliving:
            self._held.saved[self._microbatch] = {name: saved[name] for name in self._outliving if name in saved}

    def file(self, results: Sequence[Any]) -> None:
        """File the results; gradients that were handed out are None."""
        wiring, held = self._wiring, self._held
        if self.take is not None:
            for index in wiring.gradients:
                if results[index] is not None:
                    self.take(index, results[index])
        if not self._backward:
            self._file_forward(results)
        if wiring.keeps:
            kept = {name: results[index] for index, name in wiring.keeps}
            held.saved.setdefault(self._microbatch, {}).update(kept)
        if self._leaving is not None:
            held.leaving[self._leaving] = [results[index] for index in wiring.sends]

    def _file_forward(self, results: Sequence[torch.Tensor]) -> None:
        wiring, held, microbatch = self._wiring, self._held, self._microbatch
        for index, fqn in wiring.updates:
            assert held.tensor is not None, "begin() comes first"
            held.tensor(fqn).copy_(results[index])
        for index in wiring.losses:
            held.losses[microbatch] = results[index].clone()  # a loss may be a view of something large
        if wiring.outputs:
            held.outputs[microbatch] = {leaf: results[index] for index, leaf in wiring.outputs}
        if wiring.metrics:
            held.metrics[microbatch] = {name: results[index].clone() for index, name in wiring.metrics}
