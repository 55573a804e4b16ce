"""Capture model, loss and one example microbatch as one `JointGraph` of forward, loss and backward.

Contract
--------
- The model runs once under `torch.export` and its exported form once under AOT Autograd's joint trace. Both runs see fake
  tensors only: parameters, buffers and inputs are replaced by tensors without data, with the same shape, on the device that
  will run the step. So a capture allocates no memory and reads no data. Afterwards the model is as it was.
- A model with `DTensor` parameters runs under the joint trace itself, without an export (`dtensors/`).
- FQNs are the model's own. Aliases of one tensor have one canonical FQN, the first in `named_parameters`.
- A model whose gradients would be wrong raises `CaptureError`: for something that a trace would lose (`refusals.py` lists
  it), a loss that is no scalar or depends on no parameter.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import aot, pytree, symbols
from graphpp._torch.autograd import run_backward
from graphpp._torch.export_thread import traces_in_this_thread
from graphpp._torch.numbers_of_data import refused_float_arithmetic
from graphpp._torch.parallel.in_place_collectives import as_functional
from graphpp._torch.parallel.sharded_tensor import gathered, part_of_dtensor
from graphpp._torch.quick_tracing import tracing_quickly
from graphpp.batch.microbatch import TENSOR_LEAF, Microbatch, tensors_by_path, with_tensors
from graphpp.capture.activation_checkpoints import mark_checkpoints, record_checkpoints
from graphpp.capture.attributes.aliases import refuse_foreign_leaves, refuse_written_aliases
from graphpp.capture.attributes.decide import same_in_every_call
from graphpp.capture.attributes.entry_state import Accesses, EntryState, replaced_numbers
from graphpp.capture.attributes.exported import Exported, TraceResults
from graphpp.capture.attributes.updates import NumberUpdate
from graphpp.capture.attributes.writes import refuse_writes, undo_writes
from graphpp.capture.autograd_functions import FunctionCalls, record_functions
from graphpp.capture.dtensors.direct_trace import direct_trace
from graphpp.capture.dtensors.local_shards import SpreadTensors
from graphpp.capture.eager_branches import TracingQueries, answer_as_eager
from graphpp.capture.explain_errors import explain_errors
from graphpp.capture.fake_state import fake_state
from graphpp.capture.inline_modes import (
    check_grad_modes,
    drop_value_checks,
    inline_modes,
    note_grad_modes,
    run_under_autocast,
)
from graphpp.capture.loss import LossFunction, has_loss, loss_and_metrics
from graphpp.capture.outside_state import refuse_draws, refuse_generators, refuse_outside_state, refuse_random_bodies
from graphpp.capture.refusals import (
    check_model,
    refuse_during_trace,
    refuse_float_arithmetic,
    refuse_mixed_products,
    refuse_unknown_numbers,
)
from graphpp.capture.sizes.decided_by_data import admit_numbers_of_data, refuse_rounding
from graphpp.capture.source_lines import user_frame
from graphpp.capture.stacked_rnn import unstack_rnn
from graphpp.capture.transfer.code_trail import CodeTrail
from graphpp.errors import CaptureError
from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.graph.name_sizes import name_sizes
from graphpp.runtime import program
from graphpp.runtime.program import OutputRole


@dataclass(frozen=True)
class CapturedGraph:
    """A joint graph and, for evaluation, the structure of the model's output; tensors in it are `TENSOR_LEAF`.

    `fixed_because`: why the graph is for one size, if a graph for several sizes was asked for.
    `updates`: the numbers in attributes that each call changes; no value of the graph depends on the change.
    `seconds`: the time that this process took to get the graph, the wait for the rank that captured included.
    """

    joint: JointGraph
    output_spec: pytree.TreeSpec | None = None
    output_leaves: tuple[Any, ...] = ()
    updates: tuple[NumberUpdate, ...] = ()
    fixed_because: str = ""
    seconds: float = field(default=0.0, compare=False)


def capture(  # noqa: PLR0913 - everything on which a trace depends
    model: nn.Module,
    loss: LossFunction | None,
    example: Microbatch,
    device: torch.device,
    *,
    training: bool = True,
    trail: CodeTrail | None = None,
    on_export: Callable[[fx.GraphModule], None] = lambda module: None,
    varying: Mapping[str, Collection[int]] | None = None,
    param_dtype: torch.dtype | None = None,
) -> CapturedGraph:
    """Capture forward, loss and backward (`training`), or the forward with its output and, if there is one, its loss.

    Of the microbatch `example` only shapes, strides, dtypes and plain data are used. `loss=None` takes the output's own
    `.loss`. `trail` notes the code that runs, in a further run of the forward on fake tensors. `on_export` may change the
    exported forward before it is traced with its backward; a model with `DTensor`s has none. `varying`: the dimensions, by path
    of the tensor, for all sizes of which the graph is to hold; `joint.symbols` says for which it does. `param_dtype`: the dtype
    of floating-point parameters (None: their own). Raises `CaptureError` with the user's source line if the model cannot be
    captured.
    """
    with traces_in_this_thread():  # from the first look at the model: another capture gives the model fake parameters
        step = _TracedStep(model, loss, example, training)
        return _capture(step, device, trail, on_export, varying or {}, param_dtype)


def _capture(
    wrapper: _TracedStep,
    device: torch.device,
    trail: CodeTrail | None,
    on_export: Callable[[fx.GraphModule], None],
    varying: Mapping[str, Collection[int]],
    param_dtype: torch.dtype | None,
) -> CapturedGraph:
    from graphpp.capture.roles import assign_roles  # loads a part of AOT Autograd, which `import graphpp` need not

    model, (loss, example, training) = wrapper.model, wrapper.inputs
    mode = symbols.mode_with_symbols() if varying else aot.fake_mode()
    check_model(model)
    spread = SpreadTensors.of(model)
    direct = bool(spread.places)
    example_mode = aot.fake_mode() if varying else mode  # export makes the inputs with symbols of these
    fakes = {path: aot.fake_like(example_mode, tensor, device) for path, tensor in tensors_by_path(example).items()}
    dims = [sorted(varying.get(path, ())) for path in fakes] if varying else None
    grad = contextlib.nullcontext() if training else torch.no_grad()
    collectives = as_functional(lambda: user_frame(traceback.extract_stack()))
    with tracing_quickly(), refuse_draws(model, loss), collectives, fake_state(model, mode, device, param_dtype), grad:
        entry = replaced_numbers(model)
        inputs = tuple(fakes.values())
        export = partial(_export, wrapper, inputs, dims, mode, trail)
        if direct:
            _check_sizes_fixed(varying)
            if trail is not None:
                trail.refuse("a model with DTensor parameters")
            export = partial(direct_trace, wrapper, spread, inputs, mode, device)
        decided = same_in_every_call(export(entry), entry, export)
        module, functions, found = decided.exported.module, decided.exported.functions, decided.exported.found
        functions.refuse_side_effects(model)
        if torch.is_autocast_enabled(device.type) and not direct:
            run_under_autocast(module, device.type)
        inputs = decided.exported.inputs
        if not direct:
            on_export(module)
        without, numbers = torch.autocast(device.type, enabled=False), decided.entry.installed(model, Accesses())
        trace = aot.traced_before(mode, module) if direct else aot.joint_trace(mode, module, inputs)
        with explain_errors(), numbers, refuse_writes(model), without, trace as traced:
            functions.refuse_side_effects(model)
            refuse_generators(traced.graph)
            joint = assign_roles(traced, model, tuple(fakes), found.results, training=training)
            if varying:
                name_sizes(joint.graph)
                joint.symbols = symbols.Symbols(mode, [tensor.shape for tensor in inputs])
            mark_checkpoints(joint.graph, found.checkpoints)
            refuse_mixed_products(joint)
            admit_numbers_of_data(joint, mode)
            refuse_random_bodies(joint)
    found.writes.refuse_stale(joint.constants.values())
    refuse_foreign_leaves(joint.constants.values())
    refuse_written_aliases(model, joint)
    verify_joint_graph(joint)
    return CapturedGraph(joint, found.output_spec, found.output_leaves, decided.updates)


def _check_sizes_fixed(varying: Mapping[str, Collection[int]]) -> None:
    """Raise `CaptureError` if sizes are to stay open in a model with `DTensor`s."""
    if varying:
        raise CaptureError("the model has DTensor parameters, and a graph of them is for one size of the inputs")


class _TracedStep(nn.Module):
    """Model and loss as one module over the microbatch's tensors; the loss is no submodule, so its FQNs do not appear."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        example: Microbatch,
        training: bool,
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = (loss, example, training)
        self.begin(EntryState())

    def begin(self, entry: EntryState) -> None:
        """Prepare a trace with these numbers; its facts are in an object, since export resets attributes set in a forward."""
        self.entry, self.found = entry, TraceResults()

    def forward(self, *tensors: torch.Tensor) -> Any:
        found = self.found
        numbers, writes = self.entry.installed(self.model, found.accesses), undo_writes(self.model, found.writes)
        with numbers, writes:
            results = self._results(tensors)
        results += [(program.BufferUpdate(fqn), value) for fqn, value in found.writes.buffers.items()]
        found.results = tuple(role for role, _ in results)
        return tuple(part_of_dtensor(x) if isinstance(role, program.BufferUpdate) else gathered(x) for role, x in results)

    def _results(self, tensors: tuple[torch.Tensor, ...]) -> list[tuple[OutputRole, torch.Tensor]]:
        loss, example, training = self.inputs
        batch = with_tensors(example, tensors)
        output = self.model(*batch.args, **batch.kwargs)
        if training:
            return loss_and_metrics(loss, output, batch.target)
        leaves, self.found.output_spec = pytree.tree_flatten(output)
        self.found.output_leaves = tuple(
            TENSOR_LEAF if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        )
        tensor_leaves = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results: list[tuple[OutputRole, torch.Tensor]] = [
            (program.Output(index), leaf) for index, leaf in enumerate(tensor_leaves)
        ]
        if has_loss(loss, output, batch.target):
            results += loss_and_metrics(loss, output, batch.target)
        return results


def _export(
    wrapper: _TracedStep,
    fakes: tuple[torch.Tensor, ...],
    dims: Sequence[Sequence[int]] | None,
    mode: Any,
    trail: CodeTrail | None,
    entry: EntryState,
) -> Exported:
    """Export the branches that eager takes or, if they cannot be traced, the branches that the model has for a trace."""
    queries = TracingQueries()
    try:
        with answer_as_eager(queries):
            return _export_once(wrapper, fakes, dims, mode, trail, entry)
    except CaptureError:
        if not queries.any:
            raise
    return _export_once(wrapper, fakes, dims, mode, trail, entry)


def _export_once(
    wrapper: _TracedStep,
    fakes: tuple[torch.Tensor, ...],
    dims: Sequence[Sequence[int]] | None,
    mode: Any,
    trail: CodeTrail | None,
    entry: EntryState,
) -> Exported:
    functions = FunctionCalls()
    wrapper.begin(entry)
    marks, rounding = record_checkpoints(wrapper.found.checkpoints), refused_float_arithmetic(refuse_rounding)
    patches = (record_functions(functions), refuse_during_trace(), marks, refuse_outside_state(), note_grad_modes(), rounding)
    with explain_errors(), contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        if dims is None:
            exported, inputs = torch.export.export(wrapper, fakes, strict=False), fakes
        else:
            with symbols.export_in(mode):
                exported = torch.export.export(wrapper, fakes, strict=False, dynamic_shapes=symbols.varying(dims))
            inputs = symbols.inputs_of(exported)
    if trail is not None:
        with mode, aot.as_under_export(), mode.shape_env.ignore_fresh_unbacked_symbols():
            _note_code(_TracedStep(wrapper.model, *wrapper.inputs), entry, inputs, trail)
    module = unstack_rnn(inline_modes(exported.module(check_guards=False), torch.is_grad_enabled()))
    check_grad_modes(module, torch.is_grad_enabled())
    functions.restore_into(module)
    drop_value_checks(module, of_data=dims is not None)
    if dims is not None:
        refuse_unknown_numbers(module.graph, wrapper.inputs[0])
        refuse_float_arithmetic(module.graph)
    refuse_generators(module.graph)
    return Exported(module, functions, wrapper.found, inputs)


def _note_code(wrapper: _TracedStep, entry: EntryState, fakes: tuple[torch.Tensor, ...], trail: CodeTrail) -> None:
    """Run the step once more on fake tensors, with the branches that the trace took, and note the code that runs."""
    wrapper.begin(entry)
    marks = record_checkpoints(wrapper.found.checkpoints)
    try:
        with record_functions(FunctionCalls()), refuse_during_trace(), marks, trail.watching():
            with refuse_outside_state():
                values = wrapper(*fakes)
            loss = dict(zip(wrapper.found.results, values, strict=True)).get(program.Loss())
            if loss is not None:  # the code of hooks and of custom Functions runs in the backward
                run_backward(loss, [p for p in wrapper.model.parameters() if p.requires_grad])
    except Exception as error:  # the graph is right, and merely not kept
        trail.refuse(f"code that a trace runs and fake tensors cannot: {type(error).__name__}: {error}")
