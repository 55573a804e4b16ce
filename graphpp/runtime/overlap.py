"""Actions whose parts run woven into each other: OVERLAP_F_B.

Contract: `Overlaps` has the woven programs that were made for this rank's row; `run(parts)` runs the one for these parts,
for whatever microbatches, and says whether there was one. Where none was made (no part has a collective to hide), the
parts run one after the other instead, with the same numbers. No part waits for another, so all arguments are gathered
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphpp.runtime.products import Take, Within
from graphpp.runtime.program import Phase, WovenProgram
from graphpp.runtime.stage import GraphStage


@dataclass(frozen=True)
class OverlapPart:
    """One part: a phase of a stage for a microbatch."""

    stage: GraphStage
    phase: Phase
    microbatch: int


class Overlaps:
    """Runs the parts of overlapped actions as one program."""

    def __init__(self, woven: Sequence[WovenProgram]) -> None:
        self.woven = tuple(woven)
        self._known = {tuple(map(id, each.parts)): each for each in woven}

    def run(self, parts: Sequence[OverlapPart]) -> bool:
        """Run the woven program of these parts and file the results; False where there is none, and nothing was run."""
        pairs = [(part, part.stage.program(part.phase, part.microbatch)) for part in parts]
        woven = self._known.get(tuple(id(each) for _, each in pairs))
        if woven is None:
            return False
        take = _dealt([(part.stage.taker(part.phase, part.microbatch), len(each.outputs)) for part, each in pairs])
        boxed = [value for part in parts for value in part.stage.arguments(part.phase, part.microbatch)]
        results = woven.run(boxed) if take is None else woven.run(boxed, take)
        for part, each in pairs:
            own, results = results[: len(each.outputs)], results[len(each.outputs) :]
            part.stage.file(part.phase, part.microbatch, own)
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
