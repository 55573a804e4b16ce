"""Replace calls of repeated modules in an exported graph by operators that stand for them.

Contract
--------
- The exported graph is that of the whole forward, so the user's code has run as without copies, and nothing of it runs here.
  Of the calls with equal descriptions, arguments of equal layouts and equal modes, two lie in the new graph between operators
  that mark their inputs and results. Each other one is a single operator (`stand_ins.py`).
- The new graph runs once on fake tensors, from which layouts and the need of gradients are known. `DifferentError` is raised if
  a call writes into its inputs or its state, if its results share memory with another tensor, or if any of these is written
  after the call. It is raised, too, if an operation beside the call reads a tensor for which the call makes a gradient:
  autograd adds gradients in the order in which they come, and the copy would add them in another.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from graphpp._torch import aot
from graphpp.capture.repeats.equal_modules import RepeatedModules
from graphpp.capture.repeats.exported_calls import MODES, ExportedCall, held
from graphpp.capture.repeats.stand_ins import (
    CONSTANT_RESULTS,
    CONSTANTS,
    INPUTS,
    RESULTS,
    STAND_IN,
    Call,
    CallKind,
    CallTable,
    DifferentError,
    Layout,
    gets_gradient,
    operators_of,
)
from graphpp.capture.source_lines import within_call


def replace_calls(
    module: fx.GraphModule, calls: Sequence[ExportedCall], inputs: Sequence[torch.Tensor], mode: Any
) -> tuple[fx.Graph, CallTable, Mapping[RepeatedModules, str]]:
    """The new graph, its calls, and the groups without a replaced call, with reasons.

    `inputs`: fake tensors of `mode`, which is not active.

    Raises `DifferentError`, and `ValueError` for a graph that changes other state of the process than grad mode and autocast.
    """
    for node in module.graph.nodes:
        if node.op == "call_module" or (node.op == "call_function" and not _changes_nothing_else(node.target)):
            raise ValueError(f"the forward runs {node.target}, which is no operator")
    run = _Run(module, calls, inputs, mode)
    with mode, torch.set_grad_enabled(torch.is_grad_enabled()), operators_of(run.table), run.autocasts_closed():
        return run.graph(), run.table, run.refused


class _Run:
    """Runs a graph on fake tensors of its own, node by node, and makes the new graph."""

    def __init__(
        self, module: fx.GraphModule, calls: Sequence[ExportedCall], inputs: Sequence[torch.Tensor], mode: Any
    ) -> None:
        self.table = CallTable()
        self.refused: dict[RepeatedModules, str] = {}  # groups of which no call is replaced, and why
        self._module, self._mode, self._graph = module, mode, fx.Graph()
        self._kinds: dict[Any, CallKind] = {}
        self._begins = {call.nodes[0]: call for call in calls}
        self._inside = {node for call in calls for node in call.nodes}
        self._inputs = iter(inputs)
        self._new: dict[fx.Node, fx.Node] = {}  # by the node of the old graph
        self._values: dict[fx.Node, Any] = {}  # by the node of the new graph
        self._copies: dict[int, torch.Tensor] = {}  # of the module's tensors, which a write on the way may change
        self._autocasts: list[Any] = []
        self._unwritten: list[tuple[Call, torch.Tensor, int]] = []  # tensors that must keep their versions

    def graph(self) -> fx.Graph:
        """The new graph."""
        for node in self._module.graph.nodes:
            if node in self._begins and self._is_admitted(self._begins[node]):
                self._call(self._begins[node])
            elif node in self._begins:
                for each in self._begins[node].nodes:
                    self._copy(each)
            elif node not in self._inside:
                self._copy(node)
        for call, tensor, version in self._unwritten:
            if tensor._version != version:
                raise DifferentError(call, "has an input, a result, a parameter or a buffer that is written")
        self.table.kinds = [kind for kind in self._kinds.values() if kind.replaced]
        return self._graph

    @contextlib.contextmanager
    def autocasts_closed(self) -> Iterator[None]:
        """Leave on closing the autocasts that the graph has entered and, because of an error, has not left."""
        try:
            yield
        finally:
            for entered in reversed(self._autocasts):
                aot.exit_autocast(entered)  # type: ignore[no-untyped-call]

    # ----------------------------------------------------------------------------------------------- nodes one by one

    def _copy(self, node: fx.Node) -> None:
        """Copy a node into the new graph, and run it."""
        if node not in self._new:
            self._new[node] = copy = self._graph.node_copy(node, self._new.__getitem__)
            self._values[copy] = self._result(copy)

    def _result(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._own(next(self._inputs))
        if node.op == "get_attr":
            value = held(self._module, node)
            return self._own(value) if isinstance(value, torch.Tensor) else value
        if node.op == "output":
            return None
        assert callable(node.target)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._values.__getitem__)
        value = node.target(*args, **kwargs)
        if node.target is aot.enter_autocast:
            self._autocasts.append(value)
        elif node.target is aot.exit_autocast:
            self._autocasts.remove(args[0])
        return value

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake copy of a tensor, one for each."""
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = aot.fake_like(self._mode, tensor, tensor.device)
        return self._copies[id(tensor)]

    def _value(self, node: fx.Node) -> Any:
        """The value of a node of the old graph."""
        return self._values[self._new[node]]

    # ----------------------------------------------------------------------------------------------------------- calls

    def _is_admitted(self, exported: ExportedCall) -> bool:
        """False for a call that is copied as it is. The calls of a group are if the first one may not be replaced."""
        if exported.group in self.refused:
            return False
        for node in (*exported.inputs, *exported.state.values(), *exported.constants):
            self._copy(node)
        try:
            return self._has_ends(exported)
        except DifferentError as error:
            if any(call.group is exported.group for call in self.table.calls):
                raise
            self.refused[exported.group] = str(error)
            return False

    def _has_ends(self, exported: ExportedCall) -> bool:
        """Whether operators can mark where a call begins and ends in forward and backward. Raises `DifferentError`."""
        given = {node: self._value(node) for node in exported.inputs}
        if not all(map(can_be_marked, given.values())):
            raise DifferentError(exported, "takes a value that is no tensor, conjugated, or has an offset in its memory")
        learning = [node for node, tensor in given.items() if gets_gradient(tensor)]
        trained = self._trained(exported).values()
        if trained and not learning:
            return False
        inside = {*exported.nodes}
        for node in (*learning, *trained):
            readers = (user for user in node.users if user.op != "output" and user.target is not torch.ops.aten.detach.default)
            if not inside.issuperset(readers):
                raise DifferentError(exported, f"is not the only reader of {node.name}, a tensor that gets a gradient")
        return True

    def _trained(self, exported: ExportedCall) -> dict[str, fx.Node]:
        """The reads of parameters that get gradients from a call, by name."""
        return {name: node for name, node in exported.state.items() if gets_gradient(self._value(node))}

    def _call(self, exported: ExportedCall) -> None:
        """Trace or replace a call."""
        given, state = ([self._value(node) for node in nodes] for nodes in (exported.inputs, exported.state.values()))
        trained = self._trained(exported)
        inputs, layouts = tuple(map(Layout.of, given)), tuple(map(Layout.of, state))
        key = exported.kind, inputs, tuple(zip(exported.state, layouts, strict=True)), _modes()
        kind = self._kinds.setdefault(key, CallKind())
        learning = tuple(layout for name, layout in zip(exported.state, layouts, strict=True) if name in trained)
        constants = tuple(held(self._module, node) for node in exported.constants)
        call = Call(len(self.table.calls), exported, kind, inputs, learning, tuple(trained), constants)
        self.table.calls.append(call)
        versions = [(call, tensor, tensor._version) for tensor in (*given, *state)]
        if len(kind.traced) < 2:
            self._trace(call)
        else:
            self._replace(call, list(trained.values()))
        results = [self._value(node) for node in exported.results]
        self._unwritten += [*versions, *((call, tensor, tensor._version) for tensor in results)]

    def _trace(self, call: Call) -> None:
        """Copy the nodes of a call, between operators that mark its inputs and results."""
        call.kind.traced.append(call)
        exported, modes = call.exported, _modes()
        inputs = {node: self._new[node] for node in exported.inputs}
        marked = self._marked(call, exported.inputs, INPUTS, CONSTANTS)
        self._new |= marked
        for node in exported.nodes:
            self._copy(node)
        self._new |= inputs
        read = (*exported.state.values(), *exported.constants)
        given = [self._values[node] for node in (*marked.values(), *map(self._new.__getitem__, read))]
        results = [self._value(node) for node in exported.results]
        if any(self._values[node]._version for node in marked.values()):
            raise DifferentError(call, "writes into an argument")
        if modes != _modes():
            raise DifferentError(call, "changes the grad mode or autocast")
        _check_memory(call, given, results)
        if bool(call.inputs_with_grad()) != any(map(gets_gradient, results)):
            raise DifferentError(call, "takes a tensor that requires grad and returns none")
        layouts = tuple(map(Layout.of, results))
        if len(call.kind.traced) == 1:
            call.kind.results = layouts
        elif call.kind.results != layouts:
            raise DifferentError(call, f"returns other shapes than {call.kind.traced[0].fqn}")
        self._new |= self._marked(call, exported.results, RESULTS, CONSTANT_RESULTS)

    def _replace(self, call: Call, trained: Sequence[fx.Node]) -> None:
        """Put an operator in the place of a call."""
        call.kind.replaced.append(call)
        results = self._operator(call, STAND_IN, [*call.exported.inputs, *trained, *call.exported.constants])
        self._new |= dict(zip(call.exported.results, results, strict=True))

    def _marked(self, call: Call, nodes: Sequence[fx.Node], with_grad: Any, without: Any) -> Mapping[fx.Node, fx.Node]:
        """The values behind operators: one operator for those that require grad, and one for the others."""
        found: dict[fx.Node, fx.Node] = {}
        for target, grad in ((with_grad, True), (without, False)):
            given = [node for node in nodes if gets_gradient(self._value(node)) is grad]
            if given:
                found |= dict(zip(given, self._operator(call, target, given), strict=True))
        return found

    def _operator(self, call: Call, target: Any, given: Sequence[fx.Node]) -> list[fx.Node]:
        """Add an operator within a call, and run it; the nodes of its results."""
        node = self._graph.call_function(target, ([self._new[each] for each in given], call.number))
        values = self._values[node] = self._result(node)
        items = [self._graph.call_function(operator.getitem, (node, at)) for at in range(len(values))]
        self._values |= dict(zip(items, values, strict=True))
        for each in (node, *items):
            each.meta = within_call(call.exported.nodes[0], call.name)
        return items


def can_be_marked(tensor: Any) -> bool:
    """Whether a value is a tensor that is the same behind an operator."""
    return aot.is_fake(tensor) and tensor.layout is torch.strided and not (
        tensor.is_conj() or tensor.is_neg() or tensor.storage_offset()
    )  # fmt: skip


def _changes_nothing_else(target: Any) -> bool:
    return isinstance(target, aot.Operator) or target is operator.getitem or target in MODES


def _modes() -> Any:
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), *autocast, torch.is_autocast_cache_enabled()


def _check_memory(call: Call, known: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
    """Refuse results that share memory with each other, or with an argument or the state of the module."""
    taken = {tensor.untyped_storage()._cdata for tensor in known}
    for result in results:
        if not can_be_marked(result):
            raise DifferentError(call, "returns a value that is no tensor, conjugated, or has an offset in its memory")
        address = result.untyped_storage()._cdata
        if address in taken:
            raise DifferentError(call, "returns a view of an argument, of its state or of another result")
        taken.add(address)
