"""Capture model, loss and one example microbatch as one `JointGraph` of forward, loss and backward.

Contract
--------
- The model runs once under `torch.export`, and its exported form once under AOT Autograd's joint trace. Both runs use fake
  tensors for parameters, buffers and inputs, on the step's device: a capture allocates no memory, reads no data, and leaves the
  model unchanged.
- A model with `DTensor` parameters runs under the joint trace itself, without an export (`tensor_parallel/`).
- FQNs are the model's own. Aliases of one tensor have one canonical FQN, the first in `named_parameters`.
- `CaptureError` is raised where gradients would be wrong: for operations that a trace would lose (`refusals.py` lists them),
  and for a loss that is no scalar or depends on no parameter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from graphpp._torch import aot, pytree, symbols
from graphpp._torch.export_thread import traces_in_this_thread
from graphpp._torch.numbers_of_data import refused_float_arithmetic
from graphpp._torch.operators import flex_attention
from graphpp._torch.parallel.in_place_collectives import as_functional
from graphpp._torch.parallel.sharded_tensor import gathered, part_of_dtensor
from graphpp.batch.microbatch import TENSOR_LEAF, Microbatch, tensors_by_path, with_tensors
from graphpp.capture.activation_checkpoints import mark_checkpoints, record_checkpoints
from graphpp.capture.attributes.aliases import refuse_foreign_leaves, refuse_written_aliases
from graphpp.capture.attributes.exported import Exported, TraceResults
from graphpp.capture.attributes.numbers import NumberUpdate, Place, tensors_in
from graphpp.capture.attributes.second_call import same_in_every_call
from graphpp.capture.attributes.writes import refuse_writes, undo_writes
from graphpp.capture.autograd_functions import FunctionCalls, record_functions
from graphpp.capture.eager_branches import Answering, as_eager_first
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
    refuse_made_tensors,
    refuse_mixed_products,
    refuse_unknown_numbers,
)
from graphpp.capture.sizes.decided_by_data import admit_numbers_of_data, drop_unused_numbers, refuse_rounding
from graphpp.capture.sizes.same_operations import Operations
from graphpp.capture.source_lines import MODEL, inside_call, source_line, user_line
from graphpp.capture.stacked_rnn import whole_recurrences
from graphpp.capture.tensor_objects import TensorObjects, with_objects_first
from graphpp.capture.tensor_parallel.direct_trace import direct_trace
from graphpp.capture.tensor_parallel.local_shards import SpreadTensors
from graphpp.errors import CaptureError
from graphpp.passes.forward.change_forward import ForwardFacts, ForwardOptions, change_forward
from graphpp.passes.graph.joint_graph import JointGraph, verify_joint_graph
from graphpp.passes.graph.name_sizes import name_sizes
from graphpp.runtime import program
from graphpp.runtime.program import OutputRole


@dataclass(frozen=True)
class CapturedGraph:
    """A joint graph and, for evaluation, the structure of the model's output, with `TENSOR_LEAF` for tensors.

    `fixed_because`: why the graph is for one size although several sizes were requested. `plain_because`: by path, why the
    graph has one value of a number that was to be an input. `updates`: the numbers that each call
    leaves in attributes; the graph is also valid for calls that begin with them. `seconds`: the time of the capture, including
    the wait for the rank that captured. `audit` checks in a later call that the state did not change on which the
    graph depends (`watch/audit.py`); None on ranks that did not capture. `operations`: of a graph for one microbatch's
    sizes, on the rank that captured it.
    """

    joint: JointGraph
    output_spec: pytree.TreeSpec | None = None
    output_leaves: tuple[Any, ...] = ()
    updates: tuple[NumberUpdate, ...] = ()
    fixed_because: str = ""
    plain_because: Mapping[str, str] = field(default_factory=dict)
    seconds: float = field(default=0.0, compare=False)
    audit: Callable[[], None] | None = field(default=None, compare=False)
    operations: Operations | None = field(default=None, compare=False)


@traces_in_this_thread()  # around check_model too: another capture puts fake parameters into the model
def capture(  # noqa: PLR0913 - everything that a graph depends on
    model: nn.Module,
    loss: LossFunction | None,
    example: Microbatch,
    device: torch.device,
    *,
    training: bool = True,
    on_export: Callable[[fx.GraphModule], None] = lambda module: None,
    varying: Mapping[str, Collection[int]] | None = None,
    param_dtype: torch.dtype | None = None,
    outputs: bool = False,
    forward: ForwardOptions = ForwardOptions(),  # noqa: B008 - a frozen value
) -> CapturedGraph:
    """Capture forward, loss and backward (`training`), or the forward with its output and, if there is one, its loss.

    `example`: only shapes, strides, dtypes and plain data are used. `loss=None`: the output's own `.loss`. `on_export` may
    change the exported forward before the joint trace (not called for `DTensor` models). `varying`: the dynamic dimensions by
    path of the tensor; `joint.symbols` tells for which sizes the graph is valid. Of a 0-dim tensor, which has no dimension,
    the model gets the Python number, of any value. `param_dtype`: the dtype of floating-point parameters (None: their own).
    `outputs`: whether a training graph has the output too. `forward`: of the passes over the forward (not for `DTensor`
    models). Raises `CaptureError` with the user's source line if the model cannot be captured.
    """
    from graphpp.capture.roles import assign_roles  # imports AOT Autograd, which would slow down `import graphpp`

    numbers = {path for path, dims in (varying or {}).items() if not dims}
    varying = {path: dims for path, dims in (varying or {}).items() if dims}
    wrapper = TracedStep(model, loss, example, training, numbers, outputs)
    mode = symbols.mode_with_symbols() if varying else aot.fake_mode()
    check_model(model)
    direct = bool((spread := SpreadTensors.of(model)).places)
    example_mode = aot.fake_mode() if varying else mode  # export converts these inputs to symbolic ones
    places = {path: torch.device("cpu") if path in numbers else device for path in tensors_by_path(example)}
    fakes = {path: aot.fake_like(example_mode, x, places[path]) for path, x in tensors_by_path(example).items()}
    roles = [(program.Number if path in numbers else program.Input)(path) for path in fakes]
    dims = [sorted(varying.get(path, ())) for path in fakes] if varying else None
    grad = contextlib.nullcontext() if training else torch.no_grad()
    collectives = as_functional(user_line)
    if direct:
        _check_direct(forward, sizes_vary=bool(varying), training=training)

    def export(updates: Iterable[NumberUpdate]) -> Exported:
        given = tuple(fakes.values())

        def exported_with(used: TensorObjects) -> Exported:
            wrapper.objects = used
            if direct:
                return as_eager_first(partial(direct_trace, wrapper, spread, given, mode, device, updates), aot.as_under_export)
            changed = partial(change_forward, options=forward, about=_about(device), training=training)
            return as_eager_first(partial(_export, wrapper, given, dims, mode, updates, changed), contextlib.nullcontext)

        return with_objects_first(exported_with, objects.with_attributes_alone() if direct else objects)

    with aot.quick(), refuse_draws(model, loss), collectives, fake_state(model, mode, device, param_dtype) as objects, grad:
        exported = same_in_every_call(export(()), export)
        module, functions, found, inputs = exported.module, exported.functions, exported.found, exported.inputs
        updates = found.writes.updates.values()
        functions.refuse_side_effects(model)
        if torch.is_autocast_enabled(device.type) and not direct:
            run_under_autocast(module, device.type)
        if not direct:
            on_export(module)
            module.recompile()  # once for all changes of its graph
        without, writes = torch.autocast(device.type, enabled=False), refuse_writes(model, updates)
        trace = aot.traced_before(mode, module) if direct else aot.joint_trace(mode, module, inputs)
        with explain_errors(), writes, without, trace as traced:
            functions.refuse_side_effects(model)
            refuse_generators(traced.graph)
            joint = assign_roles(traced, model, roles, found.results, training=training)
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
    return CapturedGraph(joint, found.output_spec, found.output_leaves, tuple(updates))


class TracedStep(nn.Module):
    """Model and loss as one module over the microbatch's tensors. The loss is no submodule, so that it adds no FQNs."""

    def __init__(
        self,
        model: nn.Module,
        loss: LossFunction | None,
        example: Microbatch,
        training: bool,
        numbers: Collection[str] = (),
        outputs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.inputs = (loss, example, training)
        self.outputs = outputs or not training
        self.are_numbers = [path in numbers for path in tensors_by_path(example)]
        self.objects = TensorObjects()
        self.begin(())

    def begin(self, updates: Iterable[NumberUpdate]) -> None:
        """Prepare a trace that begins with `updates`. Results go into an object: export resets attributes set in a forward."""
        self.updates, self.found = updates, TraceResults()

    def forward(self, *tensors: torch.Tensor) -> Any:
        found, traced = self.found, self.objects.traced
        with self.objects.in_use(), undo_writes(self.model, found.writes, self.updates):
            results: list[tuple[OutputRole | Place, Any]] = [(role, traced(value)) for role, value in self._results(tensors)]
        results += [(program.BufferUpdate(fqn), value) for fqn, value in found.writes.buffers.items()]
        kept = ((place, x) for place, value in found.writes.kept.items() for x in tensors_in(value))
        results += [(place, traced(x).detach().clone()) for place, x in kept]
        found.results = tuple(role for role, _ in results)
        local = program.BufferUpdate | Place
        return tuple(part_of_dtensor(x) if isinstance(role, local) else gathered(x) for role, x in results)

    def _results(self, tensors: tuple[torch.Tensor, ...]) -> list[tuple[OutputRole, torch.Tensor]]:
        loss, example, training = self.inputs
        pairs = zip(tensors, self.are_numbers, strict=True)
        batch = with_tensors(example, [x.item() if number else x for x, number in pairs])
        output = self.model(*batch.args, **batch.kwargs)
        returned = self._returned(output) if self.outputs else []  # before the loss, which may change the output
        with_loss = training or has_loss(loss, output, batch)
        return returned + (loss_and_metrics(loss, output, batch) if with_loss else [])

    def _returned(self, output: Any) -> list[tuple[OutputRole, torch.Tensor]]:
        leaves, self.found.output_spec = pytree.tree_flatten(output)
        self.found.output_leaves = tuple(TENSOR_LEAF if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        values = [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [(program.Output(at), value) for at, value in enumerate(values)]


def _about(device: torch.device) -> ForwardFacts:
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return ForwardFacts(MODEL, lambda node: source_line(node.stack_trace or ""), inside_call, autocast)


def _check_direct(options: ForwardOptions, *, sizes_vary: bool, training: bool) -> None:
    """Raise `CaptureError` for an option that graphs with DTensor parameters do not have."""
    if sizes_vary:
        raise CaptureError("the model has DTensor parameters, and a graph of them is for one size of the inputs")
    head = {"logits_tokens": options.logits_tokens if training else None, "word_parts": options.word_parts}
    for name in (name for name, value in head.items() if value is not None):
        raise CaptureError(
            f"memory.{name}: the model has DTensor parameters, and its logits may be spread over ranks: leave it out"
        )


def _export(
    wrapper: TracedStep,
    fakes: tuple[torch.Tensor, ...],
    dims: Sequence[Sequence[int]] | None,
    mode: Any,
    updates: Iterable[NumberUpdate],
    change: Callable[[fx.GraphModule], None],
    answering: Answering,
) -> Exported:
    """Export a call that begins with `updates`, within the context `answering()`; `change` rewrites the forward."""
    functions = FunctionCalls(wrapper.objects.again)
    wrapper.begin(updates)
    marks, rounding = record_checkpoints(wrapper.found.checkpoints), refused_float_arithmetic(refuse_rounding)
    with contextlib.ExitStack() as patches:
        for patch in (explain_errors(), answering(), record_functions(functions), refuse_during_trace(), marks):
            patches.enter_context(patch)
        for patch in (refuse_outside_state(), note_grad_modes(), rounding, whole_recurrences(), flex_attention.trains_on_cpu()):
            patches.enter_context(patch)
        if dims is None:
            exported, inputs = torch.export.export(wrapper, fakes, strict=False), fakes
        else:
            with symbols.export_in(mode):
                exported = torch.export.export(wrapper, fakes, strict=False, dynamic_shapes=symbols.varying(dims))
            inputs = symbols.inputs_of(exported)
    module = inline_modes(exported.module(check_guards=False), torch.is_grad_enabled())
    check_grad_modes(module, torch.is_grad_enabled())
    functions.restore_into(module)
    refuse_made_tensors(flex_attention.inline_numbers(module))
    drop_value_checks(module, of_data=dims is not None and not any(wrapper.are_numbers))
    if dims is not None:
        drop_unused_numbers(module)
        refuse_unknown_numbers(module.graph, wrapper.are_numbers)
    refuse_generators(module.graph)
    change(module)
    return Exported(module, functions, wrapper.found, inputs)
