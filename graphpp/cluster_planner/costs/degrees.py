"""The amounts of one rank: how sizes grow with the rows of a microbatch, and shrink with degrees of parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from graphpp.cluster_planner.costs.operations import Size


@dataclass(frozen=True)
class Degrees:
    """`factor`: rows of a microbatch, as a multiple of the captured ones; ranks of tensor, expert and context parallelism."""

    factor: float
    tp: int = 1
    ep: int = 1
    cp: int = 1
    sequence: bool = True

    def amount(self, size: Size, whole: bool = False) -> float:
        """The bytes or FLOPs of one rank; `whole`: of all ranks of tensor parallelism together."""
        total = 0.0
        for rows, sharded, experts, captured in size:
            ranks = self.tp**sharded * self.ep**experts
            if rows:
                ranks *= self.cp * (self.tp if self.sequence and not sharded and not whole else 1)
            total += captured * self.factor**rows / ranks
        return total
