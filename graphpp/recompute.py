"""What `recompute=` says: which layers compute their values again for the backward instead of saving them.

Contract
    in   None, "full", a list of FQNs, a function of a node, or a `Recompute`
    out  for the module calls of one captured forward, the region of each operation (see `passes/recompute.py`), None
         where its value is saved; and which operations the weight gradients may compute again
    Raises `GraphPPError` for anything else, and for an FQN that is never called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from graphpp.errors import GraphPPError
from graphpp.layers import Call, repeated_layers
from graphpp.passes.aliases import is_view
from graphpp.passes.recompute import Chosen, Region, every
from graphpp.passes.split_weight_grad import Rerun, never


@dataclass(frozen=True)
class Recompute:
    """Which values are computed again.

    `layers`: FQNs of modules, each a region of its own that is computed again from what came into it; None: the model's
    repeated layers, or the modules that it calls itself where nothing repeats. `nodes`: of the operations in them, those
    it says True to (the others are saved); None: all. `weight_grad`: where the backward is split, W too may compute cheap
    values (pointwise operations and views of I) again, where that leaves fewer bytes between I and W.
    """

    layers: tuple[str, ...] | None = None
    nodes: Callable[[fx.Node], bool] | None = None
    weight_grad: bool = False

    def region(self, calls: Sequence[Call]) -> Region:
        """The region of an operation: the outermost of the chosen calls around it."""
        chosen = {call.fqn for call in self._called(calls)}

        def region(node: fx.Node) -> Hashable | None:
            return next((call for call in node.meta["calls"] if call in chosen), None)

        return region

    def _called(self, calls: Sequence[Call]) -> Sequence[Call]:
        if self.layers is None:
            return repeated_layers(calls) or [call for call in calls if call.module and "." not in call.module]
        unknown = sorted(set(self.layers) - {call.module for call in calls} - {call.fqn for call in calls})
        if unknown:
            raise GraphPPError(
                f"recompute= names {', '.join(unknown)}, which the model never calls: give FQNs of modules whose forward runs"
            )
        return [call for call in calls if call.module in self.layers or call.fqn in self.layers]

    @property
    def chosen(self) -> Chosen:
        """Which operations of the regions may run again."""
        return self.nodes or every

    @property
    def rerun(self) -> Rerun:
        """Which operations of I may run again in W."""
        return _cheap if self.weight_grad else never


Given = Recompute | str | Sequence[str] | Callable[[fx.Node], bool] | None


def chosen(given: Given) -> Recompute | None:
    """What the caller of `graphpp.compile` chose. Raises `GraphPPError`."""
    if given is None or isinstance(given, Recompute):
        return given
    if isinstance(given, str):
        if given == "full":
            return Recompute()
        raise GraphPPError(f"recompute={given!r}: take 'full', a list of FQNs, a function of a node, or graphpp.Recompute")
    if isinstance(given, Sequence) and all(isinstance(name, str) for name in given):
        return Recompute(tuple(given))
    if callable(given):
        return Recompute(nodes=given)
    raise GraphPPError(f"recompute={given!r}: take None, 'full', a list of FQNs, a function of a node, or graphpp.Recompute")


def spelled(choice: Recompute | None) -> str:
    """The choice as text that is the same on every rank."""
    if choice is None:
        return "None"
    nodes = "all" if choice.nodes is None else "a function"
    return f"layers {choice.layers}, operations: {nodes}, weight_grad={choice.weight_grad}"


def _cheap(node: fx.Node) -> bool:
    """An operation that reads each element of its inputs about once: a pointwise one, or a view."""
    return is_view(node) or torch.Tag.pointwise in getattr(node.target, "tags", ())
