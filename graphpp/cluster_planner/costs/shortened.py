"""Remove repeated layers from a forward before it is traced with its backward, and count them when costs are made.

From each run of equal units, the first two and the last stay; the second represents the removed ones, and layers whose calls
were skipped (`alike_layers.py`), if the operations of their stand-in are the represented ones. A unit is one layer, or
one turn of up to six layers if layers of several kinds alternate. Two units are equal if their operations agree one by one:
operators, arguments, shapes, submodules, checkpoints. Values of the preceding unit are compared by position, all other outside
values by identity. A unit is removed only if its values are read by itself and the next unit alone, and its parameters by
itself alone.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from graphpp.capture.activation_checkpoints import checkpointed_call
from graphpp.capture.autograd_functions import FunctionModule
from graphpp.capture.explain_errors import causes
from graphpp.capture.source_lines import MODEL, module_calls
from graphpp.cluster_planner.costs.alike_layers import CalledOnce, called_before, stand_ins
from graphpp.errors import CaptureError
from graphpp.options.split import ModuleCall
from graphpp.planner.layers import repeated_layers, spans_of

_LEFT = 3  # units of a run that stay
_LIFTED = ".lifted_tensor_"  # in the name that torch.export gives a constant of a module's forward


@dataclass(frozen=True)
class Run:
    """`layers`: FQNs of the representative unit; `others`: of the units it replaces; `end`: FQN of the layer after them."""

    layers: tuple[str, ...]
    others: tuple[tuple[str, ...], ...]
    end: str


@dataclass
class Shortening:
    """`longest`: most layers of a unit (0: keep all); `empty`: layers to skip have no submodules in a trace. `runs`: the
    runs of the first graph; `skips`: whether all operations that were removed are inside calls of the removed layers, so that a
    trace for other rows skips these calls. `complete`: whether the runs have all layers whose calls the first trace skipped."""

    longest: int
    empty: bool = True
    runs: list[Run] = field(default_factory=list)
    skips: bool = False
    complete: bool = True
    _first: CalledOnce | None = None
    _last: CalledOnce | None = None
    _lengths: Sequence[int] = ()
    _emptied: set[str] = field(default_factory=set)

    def skipping(self, model: nn.Module) -> AbstractContextManager[None]:
        """In the first trace, layers that look alike are skipped; in a further trace, all that the first one removed."""
        if self._first is None:
            length, pairs = stand_ins(model, self.longest)
            self._lengths = (length,) if pairs else range(1, self.longest + 1)
            self._emptied = {*pairs} if self.empty else set()  # some may not be called, as those of an encoder of images
            self._first = self._last = CalledOnce(model, pairs, always=False, empty=self._emptied)
            return self._first.skipping()
        units = [(run.layers, unit) for run in self.runs for unit in run.others if self.skips]
        pairs = {each: other for layers, unit in units for each, other in zip(unit, layers, strict=True)}
        self._last = CalledOnce(model, pairs, always=True, empty=self._emptied | (pairs.keys() if self.empty else set()))
        return self._last.skipping()

    @property
    def skipped(self) -> Mapping[str, str]:
        """The layers that the first trace skipped, and the layers that stand for them."""
        return {} if self._first is None else self._first.skipped

    def needs_all(self, error: CaptureError) -> bool:
        """Whether the last trace failed because layers to skip had no submodules."""
        refused = self._last is not None and self._last.refused
        return self.empty and (refused or any(isinstance(each, AttributeError | LookupError) for each in causes(error)))

    def shorten(self, module: fx.GraphModule) -> None:
        """Edit the exported graph of a whole forward in place."""
        if not self.skips:
            self._find_runs(module)
        gone = [layer for run in self.runs for unit in run.others for layer in unit]
        for node in module.graph.find_nodes(op="get_attr"):
            if not node.users and _within(_fqn(node), gone):
                module.graph.erase_node(node)
        for layer in gone:
            module.delete_submodule(f"{MODEL}.{layer}")

    def _find_runs(self, module: fx.GraphModule) -> None:
        skipped = self.skipped
        lengths = self._lengths if skipped else range(1, self.longest + 1)
        runs = next(filter(None, (_runs(module, length, skipped) for length in lengths)), [])
        removed = [(unit.layers, node) for run in runs for unit in run[2:-1] for node in unit.nodes]
        self.skips = bool(runs) and all(any(call in layers for call in module_calls(node)) for layers, node in removed)
        self.runs = [_removed(module.graph, run) for run in runs]
        gone = {layer for run in self.runs for unit in run.others for layer in unit}
        self.complete = {*skipped} <= gone and not (skipped and self._first is not None and self._first.again)


@dataclass(frozen=True)
class _Unit:
    """`skipped`: the units whose calls were skipped and for which this unit stands, in order."""

    layers: tuple[str, ...]
    nodes: Sequence[fx.Node]
    skipped: Sequence[tuple[str, ...]] = ()


def _runs(module: fx.GraphModule, length: int, skipped: Mapping[str, str]) -> list[list[_Unit]]:
    """The runs of equal units of so many layers from which units can be removed, or were skipped."""
    behind = _skipped_units(skipped, length)
    nodes = [node for node in module.graph.nodes if node.op in ("call_function", "call_module")]
    layers = repeated_layers(spans_of(enumerate(map(module_calls, nodes))))
    begins = [layer.position for layer in layers[::length]]
    ends = [*begins[1:], layers[-1].end] if layers else []
    names = [tuple(layer.fqn for layer in layers[at : at + length]) for at in range(0, len(layers), length)]
    spans = zip(names, begins, ends, strict=True)
    units = [_Unit(each, nodes[begin:end], behind.get(each, ())) for each, begin, end in spans]
    facts = [_Facts(module, units, at).found() for at in range(len(units))]
    runs = [[units[at] for at in group] for _, group in groupby(range(len(units)), key=facts.__getitem__)]
    least = called_before(length) - 2  # equal turns before one that stands for others; the first turn has other inputs
    sure = (run for run in runs if not any(unit.skipped for unit in run[:least]))
    return [run for run in sure if len(run) >= _LEFT and len(run) + len(run[1].skipped) > _LEFT]


def _skipped_units(skipped: Mapping[str, str], length: int) -> dict[tuple[str, ...], list[tuple[str, ...]]]:
    """By the layers of a unit, the units for which it stands."""
    found: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    pairs = list(skipped.items())
    for at in range(0, len(pairs), length):
        layers, others = zip(*pairs[at : at + length], strict=True)
        found.setdefault(others, []).append(layers)
    return found


class _Facts:
    def __init__(self, module: fx.GraphModule, units: Sequence[_Unit], at: int) -> None:
        self._module, self._unit = module, units[at]
        self._before = {node: place for place, node in enumerate(reversed(units[at - 1].nodes))} if at else {}
        self._own = {node: place for place, node in enumerate(self._unit.nodes)}
        self._behind = set(units[at + 1].nodes) if at + 1 < len(units) else set()
        self._checkpoints: dict[int, int] = {}

    def found(self) -> Hashable:
        """A key that equal units share; a unique key if the unit must stay."""
        shared = any("@" in layer for layer in self._unit.layers)
        return object() if shared or self._is_read_elsewhere() else tuple(map(self._node, self._unit.nodes))

    def _is_read_elsewhere(self) -> bool:
        state = [node for node in self._module.graph.find_nodes(op="get_attr") if _within(_fqn(node), self._unit.layers)]
        near = {*self._own, *self._behind}
        values_leave = any(not near.issuperset(node.users) for node in self._own)
        return values_leave or any(not self._own.keys() >= node.users.keys() for node in state)

    def _node(self, node: fx.Node) -> Hashable:
        number = checkpointed_call(node)
        return (
            self._computed(node),
            repr(fx.node.map_arg((node.args, node.kwargs), self._operand)),
            _layout(node.meta.get("val")),
            tuple(_renamed(call, self._unit.layers) for call in module_calls(node)),
            number if number is None else self._checkpoints.setdefault(number, len(self._checkpoints)),
        )

    def _computed(self, node: fx.Node) -> Hashable:
        """The operator; of a custom `autograd.Function`, whose call is a module, what the call computes."""
        called = self._module.get_submodule(str(node.target)) if node.op == "call_module" else None
        return called.computes if isinstance(called, FunctionModule) else node.target

    def _operand(self, node: fx.Node) -> Any:
        if node in self._own:
            return "own", self._own[node]
        if node in self._before:
            return "before", self._before[node]
        name = _fqn(node)
        if node.op != "get_attr":
            return "value", name
        made = name == node.target or _LIFTED in name  # a tensor that the code made, one for each call
        return "made" if made else _renamed(name, self._unit.layers), _layout(attrgetter(str(node.target))(self._module))


def _fqn(node: fx.Node) -> str:
    """The FQN of a read of the model's state; the name of any other node."""
    return str(node.target).removeprefix(f"{MODEL}.") if node.op == "get_attr" else node.name


def _within(name: str, layers: Iterable[str]) -> bool:
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def _renamed(name: str, layers: Sequence[str], others: Sequence[str] = ()) -> str:
    """Replace the layer prefix of a name by its counterpart in `others`, or by the layer's index in the unit."""
    for at, layer in enumerate(layers):
        if _within(name, [layer]):
            return (others[at] if others else f"<{at}>") + name.removeprefix(layer)
    return name


def _layout(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return tuple(map(_layout, value)) if isinstance(value, tuple | list) else id(value) if callable(value) else repr(value)


def _removed(graph: fx.Graph, run: Sequence[_Unit]) -> Run:
    """Remove the operations between the second and the last unit. The last unit then reads the second."""
    removed = run[2:-1]
    for node, stand_in in zip(removed[-1].nodes, run[1].nodes, strict=True) if removed else ():
        node.replace_all_uses_with(stand_in)
    for node in reversed([node for unit in removed for node in unit.nodes]):
        graph.erase_node(node)
    others = [*run[1].skipped, *(layers for unit in removed for layers in (unit.layers, *unit.skipped))]
    return Run(run[1].layers, tuple(others), run[-1].layers[0])


# -------------------------------------------------------------------------------------------- the whole model


class Segment(NamedTuple):
    """`stage`: in the shortened graph; `copy`: 0 in the representative unit of `run`, n in the n-th unit it stands for."""

    stage: int
    run: Run | None
    copy: int


class WholeModel:
    """The segments of the whole model, in order, from the stages of the shortened graph. `complete`: whether each run begins
    and ends at stage starts; otherwise its units cannot be separated."""

    def __init__(self, runs: Sequence[Run], calls: Sequence[ModuleCall], starts: Sequence[int]) -> None:
        position = {call.fqn: call.position for call in calls}
        begins = {position[run.layers[0]]: run for run in runs}
        self.complete = all({position[run.layers[0]], position[run.end]} <= {*starts} for run in runs)
        self._runs, self.segments, stage = runs, list[Segment](), 0
        while stage < len(starts):
            run = begins.get(starts[stage])
            end = starts[stage] + 1 if run is None else position[run.end]
            block = [at for at in range(stage, len(starts)) if starts[at] < end]
            copies = 1 if run is None else 1 + len(run.others)
            self.segments += [Segment(at, run, copy) for copy in range(copies) for at in block]
            stage += len(block)

    @property
    def stage_of(self) -> tuple[int, ...]:
        return tuple(segment.stage for segment in self.segments)

    def starts(self, starts: Sequence[int]) -> tuple[int, ...]:
        """The first operation of each segment, from the first operations of the stages."""
        lengths = [end - start for start, end in zip(starts, [*starts[1:], starts[-1]], strict=True)]
        return tuple(accumulate((lengths[stage] for stage in self.stage_of[:-1]), initial=0))

    def name(self, segment: Segment, name: str) -> str:
        if segment.run is None or not segment.copy:
            return name
        return _renamed(name, segment.run.layers, segment.run.others[segment.copy - 1])

    def readers(self, fqn: str, stages: Container[int]) -> dict[str, tuple[int, ...]]:
        """By FQN, the segments that read a parameter or buffer which these stages read, and its copies in the removed units."""
        run = next((run for run in self._runs if _within(fqn, run.layers)), None)
        read = [(at, segment) for at, segment in enumerate(self.segments) if segment.stage in stages]
        if run is None:
            return {fqn: tuple(at for at, _ in read)}
        return {
            _renamed(fqn, run.layers, layers): tuple(at for at, each in read if each.run is not run or each.copy == copy)
            for copy, layers in enumerate((run.layers, *run.others))
        }
