"""From a model to its costs: one capture on tensors without data, without a process group.

Contract: `capture_costs(model, loss, example)` gives `ModelCosts`. The model may be on the meta device; it is not changed, and
nothing runs on real data. Attention is captured as the fused kernel of the CPU, whose figures are those of other fused kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from graphpp._torch.this_thread import uncollected
from graphpp.arguments import MAPPING, checked, one_of, or_none
from graphpp.batch.microbatch import Microbatch, tensors_by_path, with_tensors
from graphpp.capture.loss import LossFunction
from graphpp.capture.trace import capture
from graphpp.cluster_planner.costs.from_graph import model_costs
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.costs.tensor_plan import Plan, fitting
from graphpp.errors import CaptureError
from graphpp.options.option import FLOATING_DTYPE
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.planner.layers import module_calls


@checked(
    CaptureError,
    model=one_of(nn.Module, takes="a torch.nn.Module"),
    example=one_of(Microbatch, takes="a graphpp.Microbatch"),
    tensor_plan=or_none(MAPPING),
    expert_plan=or_none(MAPPING),
    param_dtype=or_none(FLOATING_DTYPE),
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
    inside: bool = False,
    device_type: str = "cuda",
) -> ModelCosts:
    """The costs of a model, its loss and its backward, for a microbatch like `example`, whose first dimension are the rows.

    `param_dtype`: the dtype in which parameters compute (None: their own). `tensor_plan`, `expert_plan`: {pattern of FQNs:
    style} (`tensor_plan.py`); None: the model's own, `model.tp_plan` and `model.ep_plan` of transformers, or none. `inside`,
    `device_type`: as in `model_costs`. Raises `CaptureError`.
    """
    rows = next((tensor.shape[0] for tensor in tensors_by_path(example).values() if tensor.dim()), None)
    if rows is None:
        raise CaptureError("example: no tensor has a first dimension, the rows of the microbatch")

    def captured(example: Microbatch) -> JointGraph:
        return capture(model, loss, example, torch.device("cpu"), param_dtype=param_dtype).joint

    joint = _first(captured, example, param_dtype)
    costs = model_costs(
        joint,
        module_calls(joint),
        rows=int(rows),
        tensor_plan=_own(model, "tp_plan", joint) if tensor_plan is None else tensor_plan,
        expert_plan=_own(model, "ep_plan", joint) if expert_plan is None else expert_plan,
        inside=inside,
        device_type=device_type,
        second=lambda: captured(_twice(example, int(rows))),
    )
    dtype = None if param_dtype is None else str(param_dtype).removeprefix("torch.")
    return replace(costs, param_dtype=dtype, tokens=_tokens(example))


def _first(captured: Callable[[Microbatch], JointGraph], example: Microbatch, dtype: torch.dtype | None) -> JointGraph:
    """The graph of the example. An error says so where another dtype of the parameters may be its cause."""
    try:
        return captured(example)
    except CaptureError as error:
        numbers = any(each.is_floating_point() for each in tensors_by_path(example).values())
        if dtype is None or not numbers:
            raise
        raise CaptureError(
            f"{error}\nThe parameters were captured in {dtype} (param_dtype), and the example has numbers of another dtype: "
            "pass them in this dtype, or give param_dtype=None (--dtype own) for the model's own"
        ) from error


def _tokens(example: Microbatch) -> int:
    """The tokens of a row: the second dimension of the first tensor of integers; 0 where there is none."""
    ids = (each for each in tensors_by_path(example).values() if each.dim() > 1 and not each.is_floating_point())
    return next((int(each.shape[1]) for each in ids), 0)


def _twice(example: Microbatch, rows: int) -> Microbatch:
    """An example of twice as many rows, without data."""

    def larger(each: torch.Tensor) -> torch.Tensor:
        if not each.dim() or each.shape[0] != rows:
            return each
        return torch.empty((2 * rows, *each.shape[1:]), dtype=each.dtype, device="meta")

    return with_tensors(example, [larger(each) for each in tensors_by_path(example).values()])


def _own(model: nn.Module, name: str, joint: JointGraph) -> Plan:
    """The entries of the model's own plan that fit its parameters: a plan of transformers is for all sizes of a model."""
    return fitting(getattr(model, name, None) or {}, joint.parameters)
