"""Find the calls of repeated modules in an exported graph, and describe them so that equal calls can be told.

Contract
--------
- The nodes of a call are one run of the graph; only reads of attributes may lie between. They are operators of torch, which
  compute the same from the same arguments in every call. A call of another kind has a reason in `strange`.
- Two calls with equal descriptions have the same operators in the same order with the same arguments: values of the call by
  number, values from outside by the number of the input, parameters and buffers of the module by name, constants by number and
  layout, plain data by type and text. Shapes, strides, dtypes, source lines, names of submodules, notes of the user and
  checkpoints are equal, too. Layouts of inputs, parameters and buffers are not described.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import aot
from graphpp.capture.activation_checkpoints import checkpointed_call, without_checkpointed_call
from graphpp.capture.repeats.equal_modules import RepeatedModules
from graphpp.capture.source_lines import MODEL, module_calls, source_line

MODES = (aot.enter_autocast, aot.exit_autocast, aot.set_grad_enabled)
_OF_TORCH = ("aten", "prims", "_c10d_functional", "_c10d_functional_autograd")  # code of users may run in other operators
_PLAIN = (
    bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout
)  # fmt: skip


@dataclass
class ExportedCall:
    """One call of a member of a group: its nodes, what they read, and what others read of them.

    `name`: the call among the calls around a node; `state`: the reads of parameters and buffers of the member, by name;
    `constants`: the reads of tensors that the code made of numbers.
    """

    fqn: str
    name: str
    group: RepeatedModules
    nodes: list[fx.Node] = field(default_factory=list)
    inputs: list[fx.Node] = field(default_factory=list)
    state: dict[str, fx.Node] = field(default_factory=dict)
    constants: list[fx.Node] = field(default_factory=list)
    results: list[fx.Node] = field(default_factory=list)
    checkpoints: list[int] = field(default_factory=list)
    strange: str | None = None
    described: Any = None
    kind: int = 0  # equal for calls with equal descriptions


def exported_calls(module: fx.GraphModule, groups: Sequence[RepeatedModules]) -> list[ExportedCall]:
    """The calls of all members, in order, with their descriptions."""
    members = {fqn: group for group in groups for fqn in group.members}
    found: dict[str, ExportedCall] = {}
    last: dict[str, int] = {}
    for at, node in enumerate(each for each in module.graph.nodes if each.op not in ("get_attr", "placeholder")):
        calls = module_calls(node)
        name = next((each for each in calls if each.partition("@")[0] in members), None)
        if name is None:
            continue
        fqn = name.partition("@")[0]
        call = found.setdefault(name, ExportedCall(fqn, name, members[fqn]))
        if last.setdefault(name, at - 1) != at - 1:
            call.strange = "has an operation of another module between its own"
        last[name] = at
        call.nodes.append(node)
    for call in found.values():
        call.described = _Description(module, call).described()
    numbers: dict[Any, int] = {}
    for call in found.values():
        call.kind = numbers.setdefault((id(call.group), call.described), len(numbers))
    return list(found.values())


class _Description:
    """Describes the nodes of one call, and finds what they read and give."""

    def __init__(self, module: fx.GraphModule, call: ExportedCall) -> None:
        self._module, self._call = module, call
        self._numbers = {node: at for at, node in enumerate(call.nodes)}
        self._inputs: dict[fx.Node, int] = {}
        member: nn.Module = call.group.members[call.fqn]
        tensors = [*member.named_parameters(), *member.named_buffers()]
        self._own = {f"{MODEL}.{call.fqn}.{name}": name for name, _ in tensors}
        self._around = self._outer_calls(call.nodes[0])

    def described(self) -> Any:
        call = self._call
        found = tuple(self._node(node) for node in call.nodes)
        call.inputs = list(self._inputs)
        call.results = [node for node in call.nodes if any(user not in self._numbers for user in node.users)]
        return found, tuple(map(self._numbers.__getitem__, call.results))

    def _node(self, node: fx.Node) -> Any:
        call = self._call
        if not _is_of_torch(node) or _has_unknown_size(node.meta.get("val")):
            call.strange = f"runs {node.target}, which may compute something else in another call"
        if self._outer_calls(node) != self._around:
            call.strange = "is called from several modules"
        number = checkpointed_call(node)
        if number is not None and number not in call.checkpoints:
            call.checkpoints.append(number)
        return (
            node.op,
            node.target,
            self._value(node.args),
            self._value(node.kwargs),
            layouts(node.meta.get("val")),
            tuple(relative(each, call.fqn, "") for each in module_calls(node)[len(self._around) :]),
            _source(node.meta.get("stack_trace") or ""),
            None if number is None else call.checkpoints.index(number),
            repr(sorted(without_checkpointed_call(node.meta).items(), key=str)),
        )

    def _outer_calls(self, node: fx.Node) -> tuple[str, ...]:
        names = module_calls(node)
        return names[: names.index(self._call.name)]

    def _value(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return self._source_of(value)
        if isinstance(value, list | tuple):
            return type(value).__name__, tuple(map(self._value, value))
        if isinstance(value, Mapping):
            return "dict", tuple((key, self._value(each)) for key, each in value.items())
        if isinstance(value, slice):
            return "slice", self._value((value.start, value.stop, value.step))
        if type(value) not in _PLAIN:
            self._call.strange = f"takes an argument of the type {type(value).__name__}"
        return type(value), repr(value)

    def _source_of(self, node: fx.Node) -> Any:
        if node in self._numbers:
            return "value", self._numbers[node]
        name = self._own.get(str(node.target)) if node.op == "get_attr" else None
        if name is not None:
            self._call.state[name] = node
            return "state", name
        constant = held(self._module, node) if node.op == "get_attr" else None
        if isinstance(constant, torch.Tensor) and not aot.is_fake(constant) and not constant.requires_grad:
            known = [id(held(self._module, each)) for each in self._call.constants]
            if id(constant) not in known:
                self._call.constants.append(node)
            return "constant", [*known, id(constant)].index(id(constant)), layouts(constant)
        return "input", self._inputs.setdefault(node, len(self._inputs))


def held(module: fx.GraphModule, node: fx.Node) -> Any:
    """The attribute that a node reads."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def relative(name: str, fqn: str, other: str) -> str:
    """The name of a call with `other` in place of the module `fqn`, if the call is one of the module or of a part of it."""
    path, at, repeat = name.partition("@")
    inside = path == fqn or path.startswith(fqn + ".")
    return other + path.removeprefix(fqn) + at + repeat if inside else name


def _is_of_torch(node: fx.Node) -> bool:
    of_torch = isinstance(node.target, aot.OperatorWithSchema) and node.target.namespace in _OF_TORCH
    return node.op == "call_function" and (of_torch or node.target is operator.getitem or node.target in MODES)


def _has_unknown_size(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_unknown_size, value))
    numbers = value.shape if isinstance(value, torch.Tensor) else (value,)
    return any(isinstance(number, torch.SymInt | torch.SymFloat | torch.SymBool) for number in numbers)


def layouts(value: Any) -> Any:
    """Shapes, strides and dtypes of a node's value."""
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else None
        return tuple(value.shape), strides, value.dtype, value.device, value.layout
    if isinstance(value, list | tuple):
        return tuple(map(layouts, value))
    return repr(value)


_source = lru_cache(maxsize=1024)(source_line)

