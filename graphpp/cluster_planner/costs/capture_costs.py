"""Capture a model's costs on tensors without data, without a process group.

The model may be on the meta device and is not changed. It is captured for some rows and for twice as many, to tell which sizes
grow. Attention is captured as the CPU's fused kernel, whose figures equal those of other fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx, nn

from graphpp._torch.this_thread import uncollected
from graphpp.arguments import MAPPING, checked, one_of, or_none
from graphpp.batch.microbatch import Microbatch, tensors_by_path, with_tensors
from graphpp.capture.loss import LossFunction
from graphpp.capture.source_lines import MODEL
from graphpp.capture.trace import capture
from graphpp.cluster_planner.costs.float8 import FLOAT8, Float8, converted_layers, described, in_float8, recipes_of
from graphpp.cluster_planner.costs.from_graph import Captured, model_costs, segment_starts
from graphpp.cluster_planner.costs.long_loops import long_loops_refused
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.shortened import Shortening, WholeModel
from graphpp.cluster_planner.costs.tensor_plan import Plan, fitting
from graphpp.errors import CaptureError
from graphpp.options.option import FLOATING_DTYPE
from graphpp.passes.forward.head_and_loss import weights_of_heads
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.planner.layers import module_calls
from graphpp.runtime.fsdp.precision import floating_as
from graphpp.runtime.parameter_rows import whole_name
from graphpp.runtime.program import TensorMeta

_TURN = 6  # layers, in whose kinds the layers may alternate
_FEWEST = 2  # rows: with one row, a model may take another branch


@checked(
    CaptureError,
    model=one_of(nn.Module, takes="a torch.nn.Module"),
    example=one_of(Microbatch, takes="a graphpp.Microbatch"),
    tensor_plan=or_none(MAPPING),
    expert_plan=or_none(MAPPING),
    param_dtype=or_none(FLOATING_DTYPE),
    float8=or_none(FLOAT8),
)
@uncollected()
def capture_costs(
    model: nn.Module,
    loss: LossFunction | None,
    example: Microbatch,
    *,
    param_dtype: torch.dtype | None = torch.bfloat16,
    tensor_plan: Plan | None = None,
    expert_plan: Plan | None = None,
    float8: Float8 | None = None,
    device_type: str = "cuda",
) -> ModelCosts:
    """The costs of a model, its loss and its backward, for a microbatch like `example`, whose first dimension are the rows.

    `param_dtype`: in which parameters compute (None: their own). `tensor_plan`, `expert_plan`: {FQN pattern: style}; None:
    `model.tp_plan` and `model.ep_plan` of transformers, if any. `float8`: a recipe, or {FQN pattern: recipe} (`float8.py`).
    `device_type`: as in `model_costs`. Raises `CaptureError`.
    """
    rows = next((tensor.shape[0] for tensor in tensors_by_path(example).values() if tensor.dim()), None)
    if rows is None:
        raise CaptureError("example: no tensor has a first dimension, the rows of the microbatch")

    heads = set[str]()

    def captured(rows: int, shortening: Shortening) -> JointGraph:
        def look(module: fx.GraphModule) -> None:
            heads.update(weights_of_heads(module))
            shortening.shorten(module)

        batch = _with_rows(example, rows)
        with shortening.skipping(model), long_loops_refused(model):
            return capture(model, loss, batch, torch.device("cpu"), on_export=look, param_dtype=param_dtype).joint

    recipes = recipes_of(model, float8)
    try:
        with in_float8(model, recipes):
            found = next(filter(None, (_captured(captured, max(int(rows), _FEWEST), empty) for empty in (True, False))))
    except CaptureError as error:
        raise CaptureError(_of_example(error, example, param_dtype)) from error
    _name_all(found.joint, model, param_dtype)
    costs = model_costs(
        found,
        tensor_plan=_own(model, "tp_plan", found.joint) if tensor_plan is None else tensor_plan,
        expert_plan=_own(model, "ep_plan", found.joint) if expert_plan is None else expert_plan,
        device_type=device_type,
    )
    dtype = None if param_dtype is None else str(param_dtype).removeprefix("torch.")
    from graphpp.capture.roles import canonical_fqns  # imports AOT Autograd, which the captures have imported

    names = canonical_fqns(model)
    (head,) = [names.get(each.removeprefix(f"{MODEL}.")) for each in heads] if len(heads) == 1 else [None]
    layers = recipes or converted_layers(model)
    narrow = tuple(replace(each, float8=each.fqn.removesuffix(".weight") in layers) for each in costs.parameters)
    costs = replace(costs, parameters=narrow, float8=described(layers))
    return replace(costs, param_dtype=dtype, tokens=_tokens(example), head=head)


def _of_example(error: CaptureError, example: Microbatch, param_dtype: torch.dtype | None) -> str:
    """The error's text, or its first sentence behind what the example has to do with it."""
    numbers = {path: each.dtype for path, each in tensors_by_path(example).items() if each.is_floating_point()}
    other = next((path for path, dtype in numbers.items() if dtype != param_dtype), None)
    if param_dtype is None or other is None:
        return str(error)
    why = f"{other} is in {numbers[other]}, and the parameters were captured in {param_dtype}"
    remedy = "give the example's numbers in this dtype, or param_dtype=None (--dtype own) for the model's own"
    return f"example: {why}: {remedy} ({' '.join(line.strip() for line in str(error).splitlines()[:2])})"


def _captured(captured: Callable[[int, Shortening], JointGraph], rows: int, empty: bool) -> Captured | None:
    """The graphs for `rows` rows and for twice as many, without most of the repeated layers if these can be removed. None if
    the model needs the submodules of layers that are skipped, which they have unless `empty`."""
    for longest in (_TURN, 0):
        shortening = Shortening(longest, empty)
        try:
            joint = captured(rows, shortening)
        except CaptureError as error:
            if shortening.needs_all(error):
                return None
            if not shortening.skipped:
                raise
            continue  # the model reads more of a layer than its results
        calls = module_calls(joint)
        starts = segment_starts(joint, calls)
        whole = WholeModel(shortening.runs, calls, starts)
        if whole.complete and shortening.complete:
            break
    try:
        larger = captured(2 * rows, shortening)
    except CaptureError as error:
        if shortening.needs_all(error):
            return None
        first = " ".join(line.strip() for line in str(error).splitlines()[:2])
        why = f"the model runs with {rows} rows, and not with {2 * rows}"
        remedy = "each tensor of the example with rows has them as its first dimension, and no other tensor knows their number"
        raise CaptureError(f"cluster costs: {why}: {remedy} ({first})") from error
    return Captured(joint, larger, rows, calls, starts, whole)


def _name_all(joint: JointGraph, model: nn.Module, param_dtype: torch.dtype | None) -> None:
    """Give the graph the parameters and buffers of layers that were not traced, in the model's order."""
    known = set(map(whole_name, (*joint.parameters, *joint.buffers)))
    stores = (joint.parameters, model.named_parameters(), param_dtype), (joint.buffers, model.named_buffers(), None)
    for store, named, own in stores:
        tensors = dict(named)
        order = {fqn: at for at, fqn in enumerate(tensors)}
        for fqn, x in tensors.items():
            if fqn not in known:
                dtype = floating_as(own, x.dtype)
                store[fqn] = TensorMeta(fqn, tuple(x.shape), tuple(x.stride()), dtype, x.requires_grad)
        metas = sorted(store.items(), key=lambda item: order.get(whole_name(item[0]), -1))
        store.clear()
        store.update(metas)


def _tokens(example: Microbatch) -> int:
    """Tokens of a row: the second dimension of the first integer tensor; 0 if there is none."""
    ids = (each for each in tensors_by_path(example).values() if each.dim() > 1 and not each.is_floating_point())
    return next((int(each.shape[1]) for each in ids), 0)


def _with_rows(example: Microbatch, rows: int) -> Microbatch:
    tensors = tensors_by_path(example).values()
    own = next(tensor.shape[0] for tensor in tensors if tensor.dim())
    larger = (torch.empty((rows, *each.shape[1:]), dtype=each.dtype, device="meta") for each in tensors)
    return with_tensors(example, [new if each.shape[:1] == (own,) else each for each, new in zip(tensors, larger, strict=True)])


def _own(model: nn.Module, name: str, joint: JointGraph) -> Plan:
    """The model's own plan without entries that fit no parameter: transformers write one plan for all sizes of a model."""
    return fitting(getattr(model, name, None) or {}, joint.parameters)
