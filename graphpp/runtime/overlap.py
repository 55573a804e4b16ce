"""Actions whose parts run woven into each other: OVERLAP_F_B.

Contract: `Overlaps` has the woven programs that were made for this rank's row; `run(parts)` runs the one for these parts,
for whatever microbatches, and says whether there was one. Where none was made (no part has a collective to hide), the
parts run one after the other instead, with the same numbers. No part waits for another, so all arguments are gathered
first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphpp.runtime.gradients.gemm_accumulation import Take, Within
from graphpp.runtime.program import WovenProgram
from graphpp.runtime.task import Task


class Overlaps:
    """Runs the parts of overlapped actions as one program."""

    def __init__(self, woven: Sequence[WovenProgram]) -> None:
        self.woven = tuple(woven)
        self._known = {tuple(map(id, each.parts)): each for each in woven}

    def run(self, parts: Sequence[Task]) -> bool:
        """Run the woven program of these parts and file the results; False where there is none, and nothing was run."""
        woven = self._known.get(tuple(id(part.program) for part in parts))
        if woven is None:
            return False
        take = _dealt([(part.take, len(part.program.outputs)) for part in parts])
        boxed = [value for part in parts for value in part.arguments()]
        results = woven.run(boxed) if take is None else woven.run(boxed, take)
        for part in parts:
            count = len(part.program.outputs)
            own, results = results[:count], results[count:]
            part.file(own)
        return True


def _dealt(takers: Sequence[tuple[Take | None, int]]) -> Take | None:
    """Hands gradients, with indices that count the results of all parts, to the parts' own takers."""
    if all(take is None for take, _ in takers):
        return None
    return _Dealing([(take, index) for take, count in takers for index in range(count)])


class _Dealing:
    def __init__(self, owners: Sequence[tuple[Take | None, int]]) -> None:
        self._owners = owners

    def __call__(self, index: int, value: torch.Tensor) -> None:
        take, own = self._owner(index)
        take(own, value)

    def product(self, index: int, a: torch.Tensor, b: torch.Tensor, within: Within | None = None) -> None:
        take, own = self._owner(index)
        take.product(own, a, b, within)

    def _owner(self, index: int) -> tuple[Take, int]:
        take, own = self._owners[index]
        assert take is not None, f"result {index} is no gradient"
        return take, own
