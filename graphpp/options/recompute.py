"""`memory.recompute`: values that the backward recomputes. `planner/recompute_policy.py` finds their operations in a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from graphpp.arguments import FLAG, NUMBER, function_of, require, shown
from graphpp.errors import GraphPPError

if TYPE_CHECKING:
    from torch import fx

Nodes = Callable[["fx.Node"], bool]
_FUNCTION = function_of("a node")


@dataclass(frozen=True)
class Recompute:
    """The values that are computed a second time for the backward instead of being saved.

    `layers`: FQNs of modules. Each call of one is a region that is computed from the inputs of the call. None: the model's
    repeated layers, or the modules that the model calls itself where nothing repeats.
    `nodes`: a function of an operation's node; operations to which it says True run a second time, the others' values are
    saved. "selective": all but matrix products, convolutions, attention and collectives. None: all operations.
    `weight_grad`: where the backward is split, W too may repeat pointwise operations and views of I if fewer bytes then wait
    between I and W.
    `fraction`: above 0 and at most 1. Single operations run a second time, the cheapest first, until a stage saves this
    fraction of the bytes that it saves under `memory=None`; None: whole layers.
    `free`: cheap operations anywhere run a second time where that saves bytes, as under `memory=None`.
    Raises `GraphPPError` for a fraction out of range.
    """

    layers: tuple[str, ...] | None = None
    nodes: Nodes | Literal["selective"] | None = None
    weight_grad: bool = False
    fraction: float | None = None
    free: bool = True

    def __post_init__(self) -> None:
        if self.layers is not None and not _are_names(self.layers):
            raise GraphPPError(f"layers: take a list of FQNs, or None, got {shown(self.layers)}")
        if self.nodes not in (None, "selective") and not _FUNCTION.accepts(self.nodes):
            raise GraphPPError(f"nodes: take a function of a node, 'selective', or None, got {shown(self.nodes)}")
        for name in ("weight_grad", "free"):
            require(GraphPPError, name, FLAG, getattr(self, name))
        if self.fraction is not None and not (NUMBER.accepts(self.fraction) and 0 < self.fraction <= 1):
            raise GraphPPError(f"a fraction of the usually saved bytes is above 0 and at most 1, got {shown(self.fraction)}")

    def __str__(self) -> str:
        """The choice as text, equal on all ranks."""
        nodes = self.nodes if self.nodes is None or isinstance(self.nodes, str) else "a function"
        usual = f"layers {self.layers}, operations {nodes}, weight_grad={self.weight_grad}"
        return f"{usual}, fraction={self.fraction}, free={self.free}"


RecomputeLike = Recompute | str | float | Sequence[str] | Nodes | None
RECOMPUTE_FORMS = '"full", "selective", a fraction, FQNs, a function of a node, a `Recompute`'


def is_recompute(form: object) -> bool:
    """Whether `read_recompute` accepts the type of a form."""
    if isinstance(form, str):
        return form in ("full", "selective")
    return isinstance(form, Recompute) or NUMBER.accepts(form) or _are_names(form) or _FUNCTION.accepts(form)


def read_recompute(form: RecomputeLike) -> Recompute | None:
    """Any form as a `Recompute`; None stays None."""
    if form is None or isinstance(form, Recompute):
        return form
    if not is_recompute(form):
        raise GraphPPError(f"take None, {RECOMPUTE_FORMS}, got {shown(form)}")
    if isinstance(form, str):
        return Recompute(nodes="selective" if form == "selective" else None)
    if isinstance(form, int | float):
        return Recompute(fraction=form)
    return Recompute(nodes=form) if callable(form) else Recompute(tuple(form))


def _are_names(form: object) -> bool:
    return isinstance(form, Sequence) and not isinstance(form, str) and all(isinstance(name, str) for name in form)
