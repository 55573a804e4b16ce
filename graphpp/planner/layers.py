"""The module calls of a forward, and which of them are the model's layers.

Contract
    in   the calls in execution order, parents before children
    out  the layers in execution order, none inside another; empty if nothing repeats
    Only the order, nesting and size of the calls count, and which inner modules they call. The calls are not changed.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

from torch import fx

from graphpp.options.split import ModuleCall
from graphpp.passes.graph.joint_graph import JointGraph


def repeated_layers(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The model's layers, in execution order; [] if they cover less than a quarter of the forward and are not built alike.

    Layers are siblings `<prefix>.<integer>`, or the calls of one shared module. Of the families that cover at least two thirds
    as many operations as the largest, the one with most calls is taken; others join it if they do not overlap and are at least
    a quarter as large per call (an encoder next to a decoder). Where several siblings call the same inner modules, the
    repeated calls of a module without inner modules are steps of a loop (a recurrent cell).
    """
    inner = _inner_modules(calls)
    families = sorted(_families(calls), key=_covered, reverse=True)
    if any(_built_alike(family, inner) for family in families):
        families = [family for family in families if inner[family[0].module] or len({call.module for call in family}) > 1]
    wide = [family for family in families if 3 * _covered(family) >= 2 * _covered(families[0])]
    chosen = [max(wide, key=len)] if wide else []
    for family in families:
        alike = 4 * _covered(family) * len(chosen[0]) >= _covered(chosen[0]) * len(family)
        if alike and all(_apart(family, other) for other in chosen):
            chosen.append(family)
    layers = sorted(chain(*chosen), key=lambda call: call.position)
    large = 4 * _covered(layers) >= max((call.end for call in calls), default=0)
    return layers if large or any(_built_alike(family, inner) for family in chosen) else []


def _inner_modules(calls: Iterable[ModuleCall]) -> dict[str, set[str]]:
    """By module, the names of the modules called within it, from the module on."""
    inner = defaultdict[str, set[str]](set)
    for module in {call.module for call in calls}:
        parts = module.split(".")
        for depth in range(1, len(parts)):
            inner[".".join(parts[:depth])].add(".".join(parts[depth:]))
    return inner


def _built_alike(family: Sequence[ModuleCall], inner: Mapping[str, set[str]]) -> bool:
    """Whether the calls are of several modules, which call the same inner modules."""
    modules = {call.module for call in family}
    names = [inner[module] for module in modules]
    return len(modules) > 1 and bool(names[0]) and all(each == names[0] for each in names)


def _families(calls: Sequence[ModuleCall]) -> list[list[ModuleCall]]:
    """Groups of calls that may be layers together; no call is empty or inside another of its family."""
    families: dict[str, list[ModuleCall]] = {}
    for call in calls:
        prefix, _, last = call.module.rpartition(".")
        family = families.setdefault(f"{prefix}.*" if last.isdecimal() else call.module, [])
        if call.end > call.position >= (family[-1].end if family else 0):
            family.append(call)
    return [family for name, family in families.items() if len(family) > 1 or (family and name.endswith(".*"))]


def _covered(family: Iterable[ModuleCall]) -> int:
    return sum(call.end - call.position for call in family)


def _apart(one: Sequence[ModuleCall], other: Sequence[ModuleCall]) -> bool:
    """Whether one family ends before the other starts."""
    return one[-1].end <= other[0].position or other[-1].end <= one[0].position


def module_calls(joint: JointGraph) -> list[ModuleCall]:
    """The module calls of the forward in the order of their first operation, parents before children."""
    forward = (node for node in joint.computed() if node.meta["position"] >= 0)
    return spans_of((node.meta["position"], node.meta["calls"]) for node in forward)


def spans_of(operations: Iterable[tuple[int, Iterable[str]]]) -> list[ModuleCall]:
    """The module calls of operations, given in order as (position, FQNs of the enclosing calls)."""
    spans: dict[str, tuple[int, int]] = {}
    for position, calls in operations:
        for call in calls:
            spans[call] = spans.get(call, (position, position))[0], position + 1
    return [ModuleCall(fqn, first, end) for fqn, (first, end) in spans.items()]


def layers_of(calls: Sequence[ModuleCall]) -> Callable[[fx.Node], str | None]:
    """Map a node to its repeated layer; to "" in no layer; to None outside of all module calls (it then follows its reader)."""
    layers = {call.fqn for call in repeated_layers(calls)}

    def layer(node: fx.Node) -> str | None:
        inside: Sequence[str] = node.meta.get("calls") or ()
        return next((call for call in inside if call in layers), "") if inside else None

    return layer


def layer_or_call(calls: Sequence[ModuleCall]) -> Callable[[fx.Node], str | None]:
    """Map a node to its repeated layer, else its innermost module call, else None."""
    layer = layers_of(calls)

    def found(node: fx.Node) -> str | None:
        return layer(node) or next(reversed(node.meta.get("calls") or ()), None)

    return found
