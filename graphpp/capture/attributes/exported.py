"""One export of a model and its loss, and the comparison of two exports.

Contract: `alike` is true only if both graphs have the same operators in the same order with the same arguments, equal
constants, equal shapes, strides and dtypes, the same roles of results and the same custom Functions with equal arguments.
Names of nodes and source lines do not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from graphpp._torch import pytree
from graphpp._torch.symbols import SYMBOLIC
from graphpp.batch.microbatch import is_plain_data
from graphpp.capture.activation_checkpoints import CheckpointedCalls
from graphpp.capture.attributes.numbers import Place
from graphpp.capture.attributes.writes import AttributeWrites
from graphpp.capture.autograd_functions import FunctionCalls
from graphpp.passes.joint.key_dropout_and_random_ops import draws_random_numbers
from graphpp.runtime.program import OutputRole


@dataclass
class TraceResults:
    """Facts recorded while the forward runs."""

    results: tuple[OutputRole | Place, ...] = ()
    output_spec: pytree.TreeSpec | None = None
    output_leaves: tuple[Any, ...] = ()
    writes: AttributeWrites = field(default_factory=AttributeWrites)
    checkpoints: CheckpointedCalls = field(default_factory=CheckpointedCalls)


@dataclass(frozen=True)
class Exported:
    """The exported graph, its custom Functions, the facts recorded during the trace, and the fake inputs."""

    module: fx.GraphModule
    functions: FunctionCalls
    found: TraceResults
    inputs: tuple[torch.Tensor, ...]

    @property
    def of_call(self) -> list[Place]:
        """The places whose kept tensors depend on arguments, trained parameters or random numbers, not only on their sizes."""
        from graphpp._torch import descriptors  # imports AOT Autograd, which would slow down `import graphpp`

        output = self.module.graph.output_node()
        values: Any = output.args[0]
        if "desc" in output.meta:  # a joint graph
            pairs = zip(output.meta["desc"], values, strict=True)
            values = [node for desc, node in pairs if isinstance(desc, descriptors.PlainAOTOutput)]
        roles = zip(self.found.results, values, strict=True)
        return [role for role, node in roles if isinstance(role, Place) and _depends(self.module, node)]


def _depends(module: fx.GraphModule, node: fx.Node) -> bool:
    from graphpp._torch import descriptors

    pending, seen = [node], set[fx.Node]()
    while pending:
        source = pending.pop()
        held = attrgetter(str(source.target))(module) if source.op == "get_attr" else None
        trains = isinstance(held, torch.Tensor) and held.requires_grad
        given = source.op == "placeholder" and not isinstance(source.meta.get("desc"), descriptors.BufferAOTInput)
        if given or trains or draws_random_numbers(source.target, source.args, source.kwargs):
            return True
        inputs = [each for each in source.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor | None)]
        pending += [each for each in inputs if each not in seen]
        seen.update(inputs)
    return False


def alike(one: Exported, other: Exported) -> bool:
    if one.found.output_spec != other.found.output_spec:
        return False
    parts, others = ([*_outside(each), *_graph(each.module)] for each in (one, other))
    return len(parts) == len(others) and all(map(_same, parts, others))


def _outside(exported: Exported) -> Iterator[Any]:
    """Compared data that no node has: roles, plain data in the output, custom Functions and their non-tensor arguments."""
    yield repr([None if isinstance(role, Place) else role for role in exported.found.results])  # a list's next item
    yield from exported.found.output_leaves
    for call in exported.functions.applied:
        yield from (call.function, str(call.spec))
        yield from (None if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves)


def _graph(module: fx.GraphModule) -> Iterator[Any]:
    """For each node a text, and its operator, constant or sub-graph; nodes in arguments are named by their order."""
    order = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.nodes:
        arguments = fx.node.map_arg((node.args, node.kwargs), order.__getitem__)
        yield repr((node.op, arguments, [_layout(value) for value in pytree.tree_leaves(node.meta.get("val"))]))
        held = attrgetter(str(node.target))(module) if node.op == "get_attr" else node.target
        if isinstance(held, fx.GraphModule):
            yield from _graph(held)
        elif node.op != "placeholder":
            yield from (held, str(node.target))


def _layout(value: Any) -> Any:
    """A tensor's layout; a symbolic number equals no other."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return id(value) if isinstance(value, SYMBOLIC) else value


def _same(one: Any, other: Any) -> bool:
    """Whether two objects are equal. Fake tensors, such as parameters, equal only themselves."""
    if type(one) is type(other) is torch.Tensor:
        return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
    return one is other or (type(one) is type(other) and is_plain_data(one) and repr(one) == repr(other))
