"""Convert a trace of torch to a `JointGraph`: roles from torch's descriptors, and graphpp's own metadata.

Contract: no other file reads torch's labels of a trace (descriptors, `nn_module_stack`, `seq_nr`, `partitioner_tag`,
`stack_trace`). The result satisfies the contract of `passes/graph/joint_graph.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import descriptors
from graphpp._torch.operators.flex_attention import keep_captured_gradients
from graphpp.capture.attributes.numbers import Place
from graphpp.capture.source_lines import MODEL, module_calls, source_line
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime import program
from graphpp.runtime.model_state import own_tensors
from graphpp.runtime.parameter_rows import rows_in, rows_name, whole_name
from graphpp.runtime.program import InputRole, OutputRole, TensorMeta

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)


def assign_roles(
    traced: fx.GraphModule,
    model: nn.Module,
    given: Sequence[program.Input],
    results: Sequence[OutputRole | Place],
    *,
    training: bool,
) -> JointGraph:
    """Assign a role to every placeholder and result; a frozen parameter that the forward writes is a buffer.

    `given`: the roles of the microbatch's tensors in order. `results`: the roles of the values that the traced module returned.
    Raises `CaptureError` if the loss of a training graph depends on no parameter, and for other in-place writes of the forward.
    """
    names = canonical_fqns(model)
    inputs = traced.graph.find_nodes(op="placeholder")
    state = _State(names, _written_parameters(traced.graph, model, names), _rows_of_parameters(inputs, names))
    joint = JointGraph(traced, training, *state.metas(model))
    if training and not any(isinstance(node.meta["desc"], descriptors.TangentAOTInput) for node in inputs):
        raise CaptureError(
            "the loss does not depend on any parameter that requires grad: nothing could be trained. "
            "Check for detach(), no_grad(), frozen parameters, and that the loss reads the model's output. To evaluate only, "
            "leave out example= and call pipe.eval(x)."
        )
    _annotate(joint.graph)
    outputs = _named_outputs(joint.graph, state, results)
    _name_inputs(joint.graph, state, given)
    joint.set_outputs(outputs)
    _lift_constants(joint)
    keep_captured_gradients(joint.graph)
    joint.graph.set_codegen(fx.graph.CodeGen())  # flat arguments and results
    traced.recompile()
    return joint


def canonical_fqns(model: nn.Module) -> dict[str, str]:
    """Maps every FQN of a parameter or buffer, also aliases and module attributes, to its tensor's first FQN."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for pairs in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in pairs:
            names[name] = first.setdefault(id(tensor), name)
    for path, module in model.named_modules(remove_duplicate=False):
        places = ((f"{path}.{name}" if path else name, tensor) for name, tensor in own_tensors(module))
        names |= {place: first[id(tensor)] for place, tensor in places}
    return names


@dataclass(frozen=True)
class _State:
    """`names`: FQN -> canonical FQN. `written`: the frozen parameters that the forward writes. `rows`: by FQN, the rows of a
    parameter that are parameters of their own."""

    names: dict[str, str]
    written: frozenset[str]
    rows: dict[str, list[range]]

    def role(self, desc: Any) -> InputRole:
        """The role of an input. A tensor that export lifted out of the code has no FQN and is a constant."""
        name = desc.target.removeprefix(MODEL + ".")
        fqn, rows = whole_name(name), rows_in(name)
        if fqn not in self.names or not desc.target.startswith(MODEL + "."):
            return program.Constant(desc.target)
        fqn = self.names[fqn] if rows is None else rows_name(self.names[fqn], rows)
        parameter = isinstance(desc, descriptors.ParamAOTInput) and fqn not in self.written
        return program.Parameter(fqn) if parameter else program.Buffer(fqn)

    def metas(self, model: nn.Module) -> tuple[dict[str, TensorMeta], dict[str, TensorMeta]]:
        """Parameters and buffers by FQN, in model order."""
        named = model.named_parameters()
        parameters, buffers = _metas(pair for one in named for pair in self._cut(*one)), _metas(model.named_buffers())
        written = {fqn: parameters.pop(fqn) for fqn in list(parameters) if fqn in self.written}
        return parameters, written | buffers


    def _cut(self, fqn: str, parameter: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
        """A parameter, or its rows that are parameters of their own."""
        if fqn not in self.rows:
            return [(fqn, parameter)]
        trained, whole = parameter.requires_grad, parameter.detach()
        return [(rows_name(fqn, rows), whole[rows.start : rows.stop].requires_grad_(trained)) for rows in self.rows[fqn]]


def _rows_of_parameters(inputs: Iterable[fx.Node], names: dict[str, str]) -> dict[str, list[range]]:
    found: dict[str, list[range]] = {}
    for node in inputs:
        name = getattr(node.meta["desc"], "target", "").removeprefix(MODEL + ".")
        rows = rows_in(name)
        if rows is not None:
            found.setdefault(names[whole_name(name)], []).append(rows)
    return {fqn: sorted(set(each), key=lambda rows: rows.start) for fqn, each in found.items()}


def _metas(pairs: Iterable[tuple[str, torch.Tensor]]) -> dict[str, TensorMeta]:
    return {name: TensorMeta(name, tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad) for name, x in pairs}


def _written_parameters(graph: fx.Graph, model: nn.Module, names: dict[str, str]) -> frozenset[str]:
    described = graph.output_node().meta["desc"]
    inputs = [desc.mutated_input for desc in described if isinstance(desc, descriptors.InputMutationAOTOutput)]
    targets = [each.target.removeprefix(MODEL + ".") for each in inputs if isinstance(each, descriptors.ParamAOTInput)]
    frozen = {fqn for fqn, parameter in model.named_parameters() if not parameter.requires_grad}
    return frozenset(names[target] for target in targets if names.get(target) in frozen)


def _annotate(graph: fx.Graph) -> None:
    """Add graphpp's metadata to every node; `position` numbers the forward's nodes in execution order."""
    position = 0
    for node in graph.nodes:
        backward = node.meta.get("partitioner_tag") == "is_backward"
        node.meta["backward"] = backward
        node.meta.setdefault("val", None)
        if node.op in ("placeholder", "output"):
            continue
        node.meta["position"] = -1 if backward else position
        position += not backward
        node.meta["calls"] = module_calls(node)
        node.meta["source"] = source_line(node.meta.get("stack_trace") or "")
        node.meta["seq"] = node.meta.get("seq_nr", -1)


def _name_inputs(graph: fx.Graph, state: _State, given: Sequence[program.Input]) -> None:
    """Set roles of placeholders, and merge placeholders of aliases."""
    first: dict[InputRole, fx.Node] = {}
    for node in list(graph.find_nodes(op="placeholder")):
        role = _input_role(node.meta["desc"], state, given)
        if role in first:
            node.replace_all_uses_with(first[role])
            graph.erase_node(node)
        else:
            first[role] = node
            node.meta["role"] = role


def _input_role(desc: Any, state: _State, given: Sequence[program.Input]) -> InputRole:
    if isinstance(desc, descriptors.PlainAOTInput):
        return given[desc.idx]
    if isinstance(desc, descriptors.TangentAOTInput):
        return program.Seed()
    if isinstance(desc, descriptors.ParamAOTInput | descriptors.BufferAOTInput):
        return state.role(desc)
    raise CaptureError(f"the trace has an input that graphpp does not know: {desc!r}. Please report the model.")


def _named_outputs(graph: fx.Graph, state: _State, results: Sequence[OutputRole | Place]) -> list[tuple[OutputRole, fx.Node]]:
    """The results by role; if a buffer was written in place and then assigned, the assigned value."""
    end = graph.output_node()
    outputs: dict[OutputRole, fx.Node] = {}
    gradients: dict[OutputRole, fx.Node] = {}
    for desc, node in zip(end.meta["desc"], end.args[0], strict=True):  # type: ignore[arg-type]
        if not isinstance(node, fx.Node):
            continue
        role = _output_role(desc, state, results)
        if isinstance(role, Place):  # kept by the forward, which the capture has looked at
            continue
        if isinstance(role, program.Gradient):
            gradients[role] = _sum(graph, gradients[role], node) if role in gradients else node
        else:
            outputs[role] = _original(node) if isinstance(role, program.BufferUpdate) else node
    return [*outputs.items(), *gradients.items()]


def _original(node: fx.Node) -> fx.Node:
    """The node that `node` copies: the runtime copies new buffer values anyway, and a final copy belongs to no stage."""
    while node.target in _COPIES and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _output_role(desc: Any, state: _State, results: Sequence[OutputRole | Place]) -> OutputRole | Place:
    """Raises `CaptureError` for an in-place write into a tensor that is neither a buffer nor a frozen parameter."""
    if isinstance(desc, descriptors.PlainAOTOutput):
        returned = results[desc.idx]
        return program.BufferUpdate(state.names[returned.fqn]) if isinstance(returned, program.BufferUpdate) else returned
    if isinstance(desc, descriptors.GradAOTOutput):
        role = state.role(desc.grad_of)
        if isinstance(role, program.Parameter):
            return program.Gradient(role.fqn)
        if isinstance(role, program.Buffer):
            raise CaptureError(
                f"the buffer {role.fqn} requires grad, and a pipeline makes gradients of parameters only: register it as an "
                "nn.Parameter to train it, or detach() it."
            )
    if isinstance(desc, descriptors.InputMutationAOTOutput):
        written = desc.mutated_input
        of_model = isinstance(written, descriptors.ParamAOTInput | descriptors.BufferAOTInput)
        if of_model and isinstance(buffer := state.role(written), program.Buffer):
            return program.BufferUpdate(buffer.fqn)
        target = getattr(written, "target", "an input of the model").removeprefix(MODEL + ".")
        raise CaptureError(
            f"the forward writes in place into {target}, which is neither a buffer nor a frozen parameter. Write into a "
            "clone() of it, or compute a new tensor (inplace=False). Register a tensor that is kept between steps as a buffer."
        )
    raise CaptureError(f"the trace has a result that graphpp does not know: {desc!r}. Please report the model.")


def _sum(graph: fx.Graph, left: fx.Node, right: fx.Node) -> fx.Node:
    with graph.inserting_before(graph.output_node()):
        total = graph.call_function(torch.ops.aten.add.Tensor, (left, right))
    total.meta = {**right.meta}
    return total


def _lift_constants(joint: JointGraph) -> None:
    """Replace `get_attr` nodes of tensors by placeholders with roles."""
    graph, lifted = joint.graph, dict[str, fx.Node]()
    for node in graph.find_nodes(op="get_attr"):
        attribute = getattr(joint.module, node.target, None)
        if not isinstance(attribute, torch.Tensor):
            node.meta["held"] = attribute  # sub-graph of a higher-order operator
            continue
        if node.target not in lifted:
            joint.constants[node.target] = attribute
            with graph.inserting_before(next(iter(graph.nodes))):
                made = lifted[node.target] = graph.placeholder(node.name)
            made.meta = {"val": node.meta["val"], "backward": False, "role": program.Constant(str(node.target))}
        node.replace_all_uses_with(lifted[node.target])
        graph.erase_node(node)
