"""The module calls of a forward, and which of them are the model's layers.

Contract
    in   the calls in order of execution, parents before children
    out  the layers in order of execution, whatever they are named, none inside another; empty where nothing repeats
    Only order, nesting and size of the calls count; no particular name is known. The calls are not changed.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from torch import fx

from graphpp.options.split import ModuleCall
from graphpp.passes.graph.joint_graph import JointGraph


def repeated_layers(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls that are the model's layers, in order of execution. Empty: there are none.

    Layers are siblings `<prefix>.<integer>`, or the calls of one shared module. Of the families that cover nearly
    as many operations as the widest, the longest are the layers; others that run before or after and are not much
    smaller per call (an encoder beside a decoder) are joined to them. Together they are a quarter of the forward.
    """
    families = sorted(_families(calls), key=_covered, reverse=True)
    wide = [family for family in families if 3 * _covered(family) >= 2 * _covered(families[0])]
    chosen = [max(wide, key=len)] if wide else []
    for family in families:
        alike = 4 * _covered(family) * len(chosen[0]) >= _covered(chosen[0]) * len(family)
        if alike and all(_apart(family, other) for other in chosen):
            chosen.append(family)
    layers = sorted(chain(*chosen), key=lambda call: call.position)
    return layers if 4 * _covered(layers) >= max((call.end for call in calls), default=0) else []


def _families(calls: Sequence[ModuleCall]) -> list[list[ModuleCall]]:
    """Calls that may be layers of one another; none is empty or inside another of its family."""
    families: dict[str, list[ModuleCall]] = {}
    for call in calls:
        prefix, _, last = call.module.rpartition(".")
        family = families.setdefault(f"{prefix}.*" if last.isdecimal() else call.module, [])
        if call.end > call.position >= (family[-1].end if family else 0):
            family.append(call)
    return [family for name, family in families.items() if len(family) > 1 or (family and name.endswith(".*"))]


def _covered(family: Iterable[ModuleCall]) -> int:
    """The number of operations in these calls."""
    return sum(call.end - call.position for call in family)


def _apart(one: Sequence[ModuleCall], other: Sequence[ModuleCall]) -> bool:
    """Whether one family runs wholly before the other."""
    return one[-1].end <= other[0].position or other[-1].end <= one[0].position


def module_calls(joint: JointGraph) -> list[ModuleCall]:
    """The module calls of the forward in order of their first operation, parents before children."""
    forward = (node for node in joint.computed() if node.meta["position"] >= 0)
    return spans_of((node.meta["position"], node.meta["calls"]) for node in forward)


def spans_of(operations: Iterable[tuple[int, Iterable[str]]]) -> list[ModuleCall]:
    """The module calls of (position, FQNs of the calls around it) of operations, in order."""
    spans: dict[str, tuple[int, int]] = {}
    for position, calls in operations:
        for call in calls:
            spans[call] = spans.get(call, (position, position))[0], position + 1
    return [ModuleCall(fqn, first, end) for fqn, (first, end) in spans.items()]


def layers_of(calls: Sequence[ModuleCall]) -> Callable[[fx.Node], str | None]:
    """A function of a node: the repeated layer of the model that the operation belongs to.

    The function returns "" for an operation of no layer, None for one outside of all module calls, which goes where its
    reader goes.
    """
    layers = {call.fqn for call in repeated_layers(calls)}

    def layer(node: fx.Node) -> str | None:
        inside: Sequence[str] = node.meta.get("calls") or ()
        return next((call for call in inside if call in layers), "") if inside else None

    return layer


def layer_or_call(calls: Sequence[ModuleCall]) -> Callable[[fx.Node], str | None]:
    """A function of a node: the repeated layer of its operation, else its innermost module call, else None."""
    layer = layers_of(calls)

    def found(node: fx.Node) -> str | None:
        return layer(node) or next(reversed(node.meta.get("calls") or ()), None)

    return found
