"""A region: consecutive operations of one program, compiled as one function; and the call that replaces it.

Contract: `Region.graph` has placeholders with example values (`meta["val"]`) but without roles. A `RegionCall` is the target of
a node in the program's graph; its `run` is None until a backend has compiled the region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from graphpp._torch.symbols import SYMBOLIC, Values, at_values


@dataclass(frozen=True, eq=False)
class Region:
    """Operations to compile as one. `title`: their origin, as in `layers.3 of stage 1 backward`.

    `key`: a hash of the computation and its input layouts; regions with equal keys compute the same.
    """

    title: str
    graph: fx.Graph
    key: str

    @property
    def sizes(self) -> dict[int, Any]:
        """The inputs that are symbolic numbers, by position."""
        return {at: value for at, value in enumerate(self.examples) if isinstance(value, SYMBOLIC)}

    def at(self, values: Values) -> Region:
        """The region for one set of sizes: symbolic sizes become numbers, and inputs that were symbolic are not read."""
        graph, copies = fx.Graph(), dict[fx.Node, Any]()
        for node in self.graph.nodes:
            if node.op == "output":
                graph.output(fx.node.map_arg(node.args[0], copies.__getitem__))
                continue
            made = graph.node_copy(node, copies.__getitem__)
            made.meta = {**node.meta, "val": at_values(node.meta["val"], values)}
            copies[node] = made.meta["val"] if isinstance(node.meta["val"], SYMBOLIC) else made
        return Region(self.title, graph, f"{self.key} at {sorted(map(str, values.of_symbols.items()))}")

    @property
    def examples(self) -> list[Any]:
        """The fake tensors of the region's inputs; a symbolic number for an input that is a size."""
        return [node.meta["val"] for node in self.graph.find_nodes(op="placeholder")]

    @property
    def results(self) -> list[Any]:
        nodes: Any = self.graph.output_node().args[0]
        return [node.meta["val"] for node in nodes]


@dataclass(eq=False)
class RegionCall:
    """The function that replaces a region in a program: `run(boxed)` takes a list of inputs, empties it, returns results."""

    region: Region
    run: Callable[[list[Any]], Sequence[Any]] | None = None
    __name__: str = field(default="region", init=False)

    def __call__(self, boxed: list[Any]) -> Sequence[Any]:
        assert self.run is not None, f"{self.region.title} has not been compiled"
        return self.run(boxed)
