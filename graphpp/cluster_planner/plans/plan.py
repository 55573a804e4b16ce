"""`graphpp.plan`: search the fastest ways to train a model on machines that need not exist, or a measured pipeline.

Contract: with `machines=`, the model is captured on fake tensors in this process, without a process group, and is not changed.
With `costs=`, nothing is captured (`measured.py`). Equal arguments give equal plans.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import nn

from graphpp._torch.this_thread import uncollected
from graphpp.arguments import BYTES, COUNT, FLAG, NUMBER, Accepted, checked, one_of, one_word, or_none, require
from graphpp.batch.microbatch import Microbatch
from graphpp.cluster_planner.costs.capture_costs import capture_costs
from graphpp.cluster_planner.costs.deployment import Deployment
from graphpp.cluster_planner.costs.model_costs import ModelCosts
from graphpp.cluster_planner.plans.find import SearchSpace, facts_of, find_plans, on_each_order, searched
from graphpp.cluster_planner.plans.found_plans import TrainingPlans, order, plan_of, with_yours
from graphpp.cluster_planner.plans.layouts.other_systems import Context, Layout
from graphpp.cluster_planner.plans.layouts.price import LikeForm, price_layout, read_like
from graphpp.cluster_planner.plans.measured import MeasuredPipeline, measured_plans
from graphpp.cluster_planner.plans.mesh_shapes import SIZES, MeshLimits, MeshShape
from graphpp.cluster_planner.plans.prediction.predict_step import Prediction
from graphpp.cluster_planner.plans.request import PlanRequest
from graphpp.cluster_planner.plans.settings import ORDER, SEARCHED
from graphpp.cluster_planner.plans.training_plan import TrainingPlan
from graphpp.devices import Machines, MixedMachines, read_machines
from graphpp.devices.mixed import USABLE
from graphpp.errors import NoPlanError, ScheduleError
from graphpp.progress import working
from graphpp.schedules.search.arguments import check_size
from graphpp.schedules.table.costs import COSTS, Costs
from graphpp.schedules.table.state_bytes import STATE, StateBytes
from graphpp.units import spell_bytes

M = TypeVar("M", bound=Machines | MixedMachines)
_DOUBLED = 6  # most doublings of the GPUs that are tried where no plan fits
_TRIED = 10_000  # simulated computations of each
_SIZES = Accepted("a positive integer, or a list of them", lambda value: all(map(COUNT.accepts, _listed(value) or [0])))
_SPEED = Accepted("a positive number of bytes per second", lambda value: NUMBER.accepts(value) and value > 0)  # type: ignore[operator]
_CAPS = Accepted("a number of bytes, or a list of them", lambda value: all(map(BYTES.accepts, _listed(value) or [-1])))
_MACHINES = one_of(str, Machines, MixedMachines, takes=(
    '"<count>x<device>", e.g. "512xH100" or "8xH100 + 8xA100", or a graphpp.devices.Machines or MixedMachines'
))  # fmt: skip
_MODEL = one_of(nn.Module, ModelCosts, takes="an nn.Module, or the ModelCosts of graphpp.cluster_planner.costs")
_NAMES = Accepted(
    f"a list of names of schedules, of {', '.join(SEARCHED)}, and {ORDER}",
    lambda value: isinstance(value, list | tuple)
    and all(each in (*SEARCHED, ORDER) for each in value)
    and any(each in SEARCHED for each in value),
)
_RECOMPUTES = Accepted(
    'a list of None, "selective", "full" and fractions',
    lambda value: isinstance(value, list | tuple) and len(value) > 0 and all(map(_is_recompute, value)),
)


@checked(
    ScheduleError, model=or_none(_MODEL), batch=COUNT, memory_cap=or_none(_CAPS), tp=or_none(_SIZES), ep=or_none(_SIZES),
    pp=or_none(_SIZES), cp=_SIZES, rows=or_none(_SIZES), schedules=or_none(_NAMES), recompute=or_none(_RECOMPUTES), work=COUNT,
    offload=FLAG, search=FLAG, backend=one_word("inductor", "eager"), costs=or_none(COSTS), state=STATE, dp_shard=COUNT,
    bandwidth=or_none(_SPEED),
)  # fmt: skip
@uncollected()  # a capture and its tables make hardly any garbage before the end
def plan(  # noqa: PLR0913 - the search dimensions, all optional
    model: nn.Module | ModelCosts | None = None,
    loss: Any = None,
    example: Microbatch | None = None,
    *,
    batch: int,
    machines: Machines | MixedMachines | str | None = None,
    memory_cap: int | Sequence[int] | None = None,
    param_dtype: torch.dtype | None = torch.bfloat16,
    optimizer: str | float = "adamw",
    tensor_plan: Mapping[str, str] | None = None,
    expert_plan: Mapping[str, str] | None = None,
    float8: str | Mapping[str, str] | None = None,
    backend: str = "inductor",
    pp: int | Sequence[int] | None = None,
    tp: int | Sequence[int] | None = None,
    ep: int | Sequence[int] | None = None,
    cp: int | Sequence[int] = 1,
    rows: int | Sequence[int] | None = None,
    schedules: Sequence[str] | None = None,
    recompute: Sequence[Any] | None = None,
    offload: bool = True,
    work: int = SearchSpace().work,
    like: LikeForm | None = None,
    search: bool = True,
    costs: Costs | None = None,
    state: Sequence[StateBytes] = (),
    dp_shard: int = 1,
    bandwidth: float | None = None,
) -> TrainingPlans:
    """Search the fastest plans to train `model` on `machines`, or a pipeline with measured `costs`.

    Args:
        model, loss, example: as for `graphpp.compile`; a model on the meta device takes no memory. Or the `ModelCosts` of an
            earlier capture, without `loss` and `example`.
        batch: rows of a step on all ranks together, each like a row of `example`.
        machines: "512xH100", or a `graphpp.devices.Machines`; of unlike devices "8xH100 + 8xA100", or a `MixedMachines`: each
            pipeline rank lies on one group, in the order that is best, and a group that does not help stays idle.
        memory_cap: bytes that a device may hold, or a list with a number for each group. None: 90 % of its memory (workspaces
            and the allocator take the rest). With `costs`, one number or one for each pipeline rank; None: no limit.
        param_dtype: dtype in which the model computes; shards and optimizer keep the model's dtype. None: the model's.
        optimizer: as `graphpp.Memory(optimizer=)`.
        tensor_plan, expert_plan: {FQN pattern: style} for `tp` and `ep`, as transformers' `tp_plan`. None: the model's.
        float8: the recipe of torchao for all linear layers inside of numbered modules ("tensorwise", "rowwise",
            "rowwise_with_gw_hp"), or {FQN pattern: recipe}. None: layers as they are, also a converted model's.
        backend: "inductor", or "eager": each operator is a kernel of its own, launched by the host.
        pp, tp, ep, cp: allowed numbers of ranks along each dimension (`ep`: of data ranks). None: all that fit.
        rows: allowed rows of a microbatch. None: 1, 2, 4, 8 and 16.
        schedules: allowed names. None: all but GPipe, which 1F1B beats, and Combined1F1B; for short steps also "searched"
            orders (`graphpp.schedule_auto`).
        recompute: allowed kinds. None: no recomputation, "selective", "full". If None is allowed, also of as few layers as fit.
        offload: whether saved values may move to host memory, as few as fit, if the device has a host link.
        work: how many computations of tables are simulated; about 15,000 take a second. By default 150,000, or where settings
            are fewer than 15,000 a quarter of it for tables.
        like: a layout to price beside the best plan, as `plans.yours`; what it leaves open is searched for. In words ("pp 8,
            tp 4, MegatronInterleaved 5, keep 1"), Megatron-LM's arguments, a file of torchtitan (TOML) or DeepSpeed (JSON), a
            plan or its JSON, or {name: choice}.
        search: False: price `like` alone, also over the cap.
        costs: measured stage costs (`pipe.profile(..).costs`), in place of `model` and `machines`. The search then chooses the
            schedule and `keep`; `pp` and `rows` are one number each.
        state: with `costs`, the bytes of parameters, gradients, optimizer and buffers (`pipe.plan.memory.state`).
        dp_shard: with `costs`, the number of ranks that shard the parameters (1: not sharded).
        bandwidth: with `costs`, bytes per second that a rank sends along `dp_shard`. None: use `costs.gathers`.

    Raises:
        CaptureError, NoPlanError, ScheduleError: the model cannot be captured; no plan fits, and the closest is named; `work`
            is too small, or arguments conflict.
    """
    given = locals()
    if costs is not None:
        _refuse_unused("costs=", given)
        shape, own_rows = MeshShape(pp=_one("pp", pp), dp_shard=dp_shard), _one("rows", rows)
        microbatches, rest = divmod(batch, own_rows * dp_shard)
        if rest or not microbatches:
            raise ScheduleError(f"batch: take a multiple of {own_rows} rows on {dp_shard} ranks along dp_shard, got {batch}")
        check_size(shape.pp, microbatches)
        measured = MeasuredPipeline(costs, state, shape, own_rows, microbatches, bandwidth)
        return replace(measured_plans(measured, memory_cap, schedules), asked=_asked(given))
    if model is None or machines is None:
        raise ScheduleError("plan: give a model and machines=, or costs=pipe.profile(..).costs")
    _refuse_unused("a ModelCosts" if isinstance(model, ModelCosts) else "machines=", given)
    require(ScheduleError, "machines", _MACHINES, machines)
    found, cap = _with_cap(read_machines(machines) if isinstance(machines, str) else machines, memory_cap)
    known = model if isinstance(model, ModelCosts) else _captured(
        model, loss, example, param_dtype=param_dtype, tensor_plan=tensor_plan, expert_plan=expert_plan,
        float8=float8, device_type=found.device.torch_type,
    )  # fmt: skip
    dtype = None if param_dtype is None else str(param_dtype).removeprefix("torch.")
    if known.param_dtype != dtype:
        captured = f"the costs were captured with param_dtype={known.param_dtype}"
        raise ScheduleError(f"param_dtype={param_dtype}: {captured}: give both the same one")
    limits = MeshLimits(
        stages=len(known.starts), experts=known.expert_ranks, tp=max(1, known.tensor_ranks), cp=max(_listed(cp)),
        domain=found.per_machine,
    )  # fmt: skip
    sizes = {name: _listed(given) for name, given in (("pp", pp), ("tp", tp), ("ep", ep), ("cp", cp)) if given is not None}
    space = SearchSpace(
        rows=SearchSpace.rows if rows is None else tuple(_listed(rows)),
        recompute=SearchSpace.recompute if recompute is None else tuple(recompute),
        schedules=schedules, sizes=sizes, offload=offload, work=work,
    )  # fmt: skip
    if like is None and not search:
        raise ScheduleError("search: without a search there is nothing to price: give like=")
    usual = Deployment(optimizer=optimizer, compiled=backend == "inductor", overlapped=("backward",))
    request = PlanRequest(known, found, batch, known.tokens, dtype, usual)
    with working("searching plans"):
        layout = None if like is None else read_like(like, Context(found.gpus, len(known.layers)))
        yours = None if layout is None else _priced(request, limits, cap, space, layout)
        try:
            plans = find_plans(request, limits, cap, space) if search else None
        except NoPlanError as error:
            own = "" if yours is None else f". Yours, {yours.setting}, takes {spell_bytes(yours.peak)}"
            raise NoPlanError(f"{error}. {_fits_from(request, limits, cap, space)}{own}") from None
    if layout is None or yours is None:
        assert plans is not None
    else:
        plans = with_yours(plans, yours, layout.notes, cap)
    return replace(plans, asked=_asked(given, known) | _asked_of(found))


def _fits_from(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace) -> str:
    """From how many GPUs a plan fits, in words: settings with little memory are tried for doubled numbers."""
    machines, names = request.machines, [name for name in space.schedules or SEARCHED if name != ORDER]
    mixed = not isinstance(machines, Machines)
    least = replace(space, rows=(min(space.rows),), recompute=space.recompute[-1:], schedules=names, work=_TRIED)
    for _ in range(_DOUBLED):
        machines = _doubled(machines)
        with suppress(ScheduleError):  # there may be no mesh of this batch
            larger = request.on(machines)
            searches = on_each_order(larger, limits, cap, lambda one, to, most: searched(one, to, most, least), all_of=True)
            if any(each.over(cap) <= 0 for search in searches for each in search.found.values()):
                return f"A plan fits on {machines if mixed else f'{machines.gpus} GPUs'}, the fewest of doubled numbers"
    return f"None fits on {machines if mixed else f'{machines.gpus} GPUs'} either"


def _doubled(machines: M) -> M:
    """Twice as many GPUs in each group, in full machines if they are more than one."""
    if isinstance(machines, MixedMachines):
        return replace(machines, groups=tuple(map(_doubled, machines.groups)))
    gpus, each = 2 * machines.gpus, machines.per_machine
    return replace(machines, gpus=gpus if gpus <= each else -(-gpus // each) * each)


def _with_cap(machines: M, memory_cap: int | Sequence[int] | None) -> tuple[M, int]:
    """The machines with caps of their groups, and the bytes that a device may hold, of unlike devices the most."""
    given, groups = _listed(memory_cap), len(machines.groups)
    if isinstance(memory_cap, Sequence) and len(given) != groups:
        raise ScheduleError(f"memory_cap: take a number of bytes for each of {groups} groups of {machines}, got {len(given)}")
    if isinstance(machines, MixedMachines):
        machines = replace(machines, caps=tuple(given * (groups if len(given) == 1 else 1)) or machines.caps)
        return machines, max(machines.caps)
    return machines, given[0] if given else round(machines.device.memory * USABLE)


def _priced(request: PlanRequest, limits: MeshLimits, cap: int, space: SearchSpace, layout: Layout) -> TrainingPlan:
    """The plan of a layout, on mixed machines in the best order of their groups."""

    def price(one: PlanRequest, to: MeshLimits, most: int) -> tuple[Prediction, PlanRequest]:
        return price_layout(one, to, most, space, layout), one

    fewer = prod(layout.choices.get(name, request.machines.gpus) for name in SIZES) < request.machines.gpus
    every = on_each_order(request, limits, cap, price, all_of=not fewer)  # a layout of fewer GPUs is one of some groups
    found, own = min(every, key=lambda each: (max(0, each[0].over(cap)), *order(each[0])))
    return plan_of(found, facts_of(own, found))


def _asked(given: Mapping[str, Any], known: ModelCosts | None = None) -> dict[str, str]:
    """The model, the limits of the search and the versions, for the page of the plans."""
    usual, model = inspect.signature(plan).parameters, given["model"]
    limits = {name: _said(given[name]) for name in _LIMITS if given[name] != usual[name].default}
    return {
        **({"model": type(model).__name__} if isinstance(model, nn.Module) else {}),
        **({} if known is None else {"parameters": f"{sum(each.elements for each in known.parameters):,}"}),
        **({} if known is None else {"optimizer": str(given["optimizer"])}),
        **limits,
        "versions": f"graphpp {sys.modules['graphpp'].__version__}, torch {torch.__version__}",
    }


def _asked_of(machines: Machines | MixedMachines) -> dict[str, str]:
    """Mixed machines and the caps of their groups, for the page of the plans."""
    if isinstance(machines, Machines):
        return {}
    caps = (f"{group.device.name} {spell_bytes(cap)}" for group, cap in zip(machines.groups, machines.caps, strict=True))
    return {"machines": str(machines), "memory cap": ", ".join(caps)}


def _said(value: object) -> str:
    listed = value if isinstance(value, list | tuple) else [value]
    return ", ".join("none" if each is None else str(each) for each in listed)


_LIMITS = (
    "backend", "pp", "tp", "ep", "cp", "rows", "schedules", "recompute", "offload", "work", "search", "dp_shard", "bandwidth",
    "tensor_plan", "expert_plan",
)  # fmt: skip
_OF_COSTS = ("state", "dp_shard", "bandwidth")
_OF_CAPTURE = ("loss", "example", "tensor_plan", "expert_plan", "float8")
_UNUSED = {
    "costs=": (
        "model", "machines", *_OF_CAPTURE, "param_dtype", "optimizer", "backend", "tp", "ep", "cp", "recompute", "offload",
        "work", "like", "search",
    ),
    "a ModelCosts": (*_OF_CAPTURE, *_OF_COSTS),
    "machines=": _OF_COSTS,
}  # fmt: skip
"""By what a search starts from, the arguments that it does not read."""


def _refuse_unused(source: str, given: Mapping[str, Any]) -> None:
    """Raise `ScheduleError` for an argument that has no effect beside the source."""
    usual = {name: each.default for name, each in inspect.signature(plan).parameters.items()}
    unused = [name for name in _UNUSED[source] if given[name] is not usual[name] and given[name] != usual[name]]
    if unused:
        raise ScheduleError(f"{unused[0]}: it has no effect beside {source}: leave one of the two out")


def _one(name: str, given: int | Sequence[int] | None) -> int:
    found = _listed(given)
    if len(found) != 1:
        raise ScheduleError(f"{name}: beside costs= give one number, that of the pipeline to plan, got {given}")
    return found[0]


def _captured(model: nn.Module, loss: Any, example: Microbatch | None, **options: Any) -> ModelCosts:
    if example is None:
        raise ScheduleError("plan needs example=: a graphpp.Microbatch of one or more rows, which may be on the meta device")
    with working("capturing the model"):
        return capture_costs(model, loss, example, **options)


def _listed(given: Any) -> list[int]:
    return [] if given is None else list(given) if isinstance(given, list | tuple) else [given]


def _is_recompute(value: object) -> bool:
    return value is None or value in ("selective", "full") or (isinstance(value, float) and 0 < value <= 1)
