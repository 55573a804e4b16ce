"""What `recompute=` says: which values are computed again for the backward instead of being saved.

Contract
    in   None, "full", "selective", a fraction, a list of FQNs, a function of a node, or a `Recompute`
    out  for the module calls of one captured forward, the region of each operation
         (see `passes/recompute/recompute_regions.py`), None
         where its value is saved; on what terms single values are computed again (see `passes/recompute/choose_saved.py`);
         and which
         operations the weight gradients may compute again
    Raises `GraphPPError` for anything else, and for an FQN that is never called.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from graphpp.errors import GraphPPError
from graphpp.options.split import Call
from graphpp.passes.graph.collectives import is_collective
from graphpp.passes.graph.op_costs import Cost, OpCosts, is_cheap, is_heavy
from graphpp.passes.recompute.choose_saved import Savings
from graphpp.passes.recompute.recompute_regions import Chosen, Region, every
from graphpp.passes.stage.split_weight_grad import Rerun, never
from graphpp.planner.layers import repeated_layers


@dataclass(frozen=True)
class Recompute:
    """Which values are computed again.

    `layers`: FQNs of modules, each a region of its own that is computed again from what came into it; None: the model's
    repeated layers, or the modules that it calls itself where nothing repeats. `nodes`: of the operations in them, those
    it says True to (the others are saved); None: all. `weight_grad`: where the backward is split, W too may compute cheap
    values (pointwise operations and views of I) again, where that leaves fewer bytes between I and W. `fraction`: not whole
    layers, but of the operations in them those that cost the least time, until a stage saves this fraction of the bytes
    that it saves under `recompute=None`. `free`: cheap operations, wherever they are, run again where less is saved for
    it, as under `recompute=None`.
    """

    layers: tuple[str, ...] | None = None
    nodes: Callable[[fx.Node], bool] | None = None
    weight_grad: bool = False
    fraction: float | None = None
    free: bool = True

    def __post_init__(self) -> None:
        """Raises `GraphPPError` for a fraction that is none."""
        if self.fraction is not None and not (_is_number(self.fraction) and 0 < self.fraction <= 1):
            raise GraphPPError(
                f"recompute={self.fraction!r}: the fraction of the usual bytes that a stage may save is above 0 and at most 1"
            )

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

    def savings(self, region: Region | None, device_type: str, cost: Cost | None) -> Savings | None:
        """On what terms single values are computed again; a budget counts where a region is given."""
        costs = OpCosts.of(device_type)
        worth = _WORTH / costs.memory
        if region is not None and self.fraction is not None:
            return Savings(worth, cost or costs, self.fraction, region, self.chosen)
        return Savings(worth, costs, chosen=self.chosen) if self.free else None

    @property
    def rerun(self) -> Rerun:
        """Which operations of I may run again in W."""
        return is_cheap if self.weight_grad else never


Given = Recompute | str | float | Sequence[str] | Callable[[fx.Node], bool] | None

_WORTH = 8  # bytes of memory traffic for each byte less to save: about three pointwise operations in a row
_TAKES = "'full', 'selective', a fraction, a list of FQNs, a function of a node, or graphpp.Recompute"


def chosen(given: Given) -> Recompute | None:
    """What the caller of `graphpp.compile` chose. Raises `GraphPPError`."""
    if given is None or isinstance(given, Recompute):
        return given
    if given in ("full", "selective"):
        return Recompute(nodes=_is_light if given == "selective" else None)
    if _is_number(given):
        return Recompute(fraction=given)  # type: ignore[arg-type]
    if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(name, str) for name in given):
        return Recompute(tuple(given))
    if callable(given):
        return Recompute(nodes=given)
    raise GraphPPError(f"recompute={given!r}: take None, {_TAKES}")


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


def _is_light(node: fx.Node) -> bool:
    """Neither a contraction (matrix product, convolution, attention), whose result is worth keeping, nor a collective."""
    return not is_heavy(node) and not is_collective(node)


def spelled(choice: Recompute | None) -> str:
    """The choice as text that is the same on every rank."""
    if choice is None:
        return "None"
    named: dict[Any, str] = {None: "all", _is_light: "those that are no contractions"}
    nodes = named.get(choice.nodes, "a function")
    usual = f"layers {choice.layers}, operations: {nodes}, weight_grad={choice.weight_grad}"
    return f"{usual}, fraction={choice.fraction}, free={choice.free}"
