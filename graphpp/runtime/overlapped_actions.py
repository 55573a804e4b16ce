"""Runs the parts of an OVERLAP_F_B action as one woven program, whose collectives hide under the other part's computation.

Contract: `OverlappedActions` has the woven programs of this rank's row. `run(parts)` runs the woven program of these tasks'
programs, for any microbatches, and returns True; it returns False, having run nothing, if there is none (no part has a
collective to hide). The runner then runs the parts one after the other, with the same numbers. No part reads a result of
another, so the arguments of all parts are gathered before the woven program runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpp.runtime.gradients.gemm_accumulation import MatmulLayout
from graphpp.runtime.gradients.gradient_sink import GradientSink
from graphpp.runtime.program import WovenProgram
from graphpp.runtime.task import Task


class OverlappedActions:
    """The woven programs of one rank, found by the programs of their parts."""

    def __init__(self, woven: Sequence[WovenProgram]) -> None:
        self.woven = tuple(woven)
        self._by_parts = {tuple(map(id, each.parts)): each for each in woven}

    def run(self, parts: Sequence[Task]) -> bool:
        """Run the woven program of these tasks and file its results; False, and nothing runs, where there is none."""
        woven = self._by_parts.get(tuple(id(part.program) for part in parts))
        if woven is None:
            return False
        owners = [(part.sink, index) for part in parts for index in range(len(part.program.outputs))]
        arguments = [value for part in parts for value in part.arguments()]
        takes = any(part.sink is not None for part in parts)
        results = woven.run(arguments, WovenSink(owners)) if takes else woven.run(arguments)
        for part in parts:
            count = len(part.program.outputs)
            own, results = results[:count], results[count:]
            part.file(own)
        return True


class WovenSink:
    """Forwards the gradients of a woven program, whose indices count the results of all parts, to the parts' own sinks."""

    def __init__(self, owners: Sequence[tuple[GradientSink | None, int]]) -> None:
        """`owners`: for each result of the woven program, the sink of its part and its index among the part's results."""
        self._owners = owners

    def __call__(self, index: int, value: torch.Tensor) -> None:
        """Forward a gradient."""
        sink, own = self._owner(index)
        sink(own, value)

    def matmul(self, index: int, a: torch.Tensor, b: torch.Tensor, layout: MatmulLayout | None = None) -> None:
        """Forward the factors of a gradient."""
        sink, own = self._owner(index)
        sink.matmul(own, a, b, layout)

    def _owner(self, index: int) -> tuple[GradientSink, int]:
        sink, own = self._owners[index]
        assert sink is not None, f"result {index} is no gradient"
        return sink, own
