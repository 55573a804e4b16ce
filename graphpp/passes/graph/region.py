"""TODO contract."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True, eq=False)
class Region:
    """Operations to be compiled as one. `title`: where they come from, `layers.3 of stage 1 backward`."""

    title: str
    graph: fx.Graph
    key: str

    @property
    def examples(self) -> list[Any]:
        """The values, without data, that it is made for."""
        return [node.meta["val"] for node in self.graph.find_nodes(op="placeholder")]

    @property
    def results(self) -> list[Any]:
        """What it returns, without data."""
        nodes: Any = self.graph.output_node().args[0]
        return [node.meta["val"] for node in nodes]


@dataclass(eq=False)
class RegionCall:
    """What a program calls in place of a region: `run(boxed)` takes a list of inputs, empties it, and returns the results."""

    region: Region
    run: Callable[[list[Any]], Sequence[Any]] | None = None
    __name__: str = field(default="region", init=False)

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        """Run it."""
        assert self.run is not None, f"{self.region.title} has not been compiled"
        return self.run(boxed)
