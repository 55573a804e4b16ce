"""graphpp: pipeline parallelism for an unmodified `nn.Module`, from one joint forward/backward graph.

pipe = graphpp.compile(model, loss, split=["layers.4"], schedule="1F1B", microbatches=8)
result = pipe.step(tokens, target=labels)

A name is loaded when it is first used (`_HOMES`), so `graphpp --help` need not load PyTorch; type checkers read the imports.
"""

import atexit
import gc
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphpp import attention, cache, devices, experts, schedules
    from graphpp.api import compile, verify
    from graphpp.batch.microbatch import Microbatch, absent, whole
    from graphpp.capture.objects.unwatched import unwatched
    from graphpp.cluster_planner.plans.found_plans import TrainingPlans
    from graphpp.cluster_planner.plans.plan import plan
    from graphpp.cluster_planner.plans.training_plan import TrainingPlan
    from graphpp.errors import (
        BatchError,
        CaptureError,
        CheckpointError,
        GraphPPError,
        MismatchError,
        NoPlanError,
        RankFailure,
        ScheduleError,
        SplitError,
    )
    from graphpp.options.backend import Custom, Eager, Inductor
    from graphpp.options.debug import Debug
    from graphpp.options.gradients import Gradients
    from graphpp.options.memory import Memory
    from graphpp.options.microbatches import Microbatches
    from graphpp.options.offload import Offload
    from graphpp.options.parallel import Parallel
    from graphpp.options.recompute import Recompute
    from graphpp.pipeline.pipeline import Pipeline
    from graphpp.pipeline.profile import Profile
    from graphpp.pipeline.results import EvalResult, StepMetrics, StepResult
    from graphpp.planner.megatron_layout import Layout
    from graphpp.planner.plan import Plan
    from graphpp.planner.resolve_split import split_points
    from graphpp.report.page_html import html
    from graphpp.schedules.any_form import simulate
    from graphpp.schedules.draw.chrome_trace import chrome_trace
    from graphpp.schedules.draw.svg import svg
    from graphpp.schedules.generate.names import stage_ids
    from graphpp.schedules.search.scheduler import schedule_auto
    from graphpp.schedules.simulate.timeline import Event, Timeline
    from graphpp.schedules.table.costs import Costs, StageCosts
    from graphpp.schedules.table.schedule import Schedule
    from graphpp.schedules.table.state_bytes import StateBytes
    from graphpp.verification.report import Comparison, Difference, FirstDifference, Verification

# A pipeline is a reference cycle with its process group. A gloo thread that frees a message while the interpreter shuts down
# aborts the process, so unused pipelines are collected before. Exit functions of its modules register later, so they run first.
atexit.register(gc.collect)

__version__ = "0.1.0"
__all__ = [
    "BatchError",
    "CaptureError",
    "CheckpointError",
    "Comparison",
    "Costs",
    "Custom",
    "Debug",
    "Difference",
    "Eager",
    "EvalResult",
    "Event",
    "FirstDifference",
    "Gradients",
    "GraphPPError",
    "Inductor",
    "Layout",
    "Memory",
    "Microbatch",
    "Microbatches",
    "MismatchError",
    "NoPlanError",
    "Offload",
    "Parallel",
    "Pipeline",
    "Plan",
    "Profile",
    "RankFailure",
    "Recompute",
    "Schedule",
    "ScheduleError",
    "SplitError",
    "StageCosts",
    "StateBytes",
    "StepMetrics",
    "StepResult",
    "Timeline",
    "TrainingPlan",
    "TrainingPlans",
    "Verification",
    "absent",
    "attention",
    "cache",
    "chrome_trace",
    "compile",
    "devices",
    "experts",
    "html",
    "plan",
    "schedule_auto",
    "schedules",
    "simulate",
    "split_points",
    "stage_ids",
    "svg",
    "unwatched",
    "verify",
    "whole",
]

_HOMES = {
    "graphpp.api": "compile verify",
    "graphpp.batch.microbatch": "Microbatch absent whole",
    "graphpp.capture.objects.unwatched": "unwatched",
    "graphpp.errors": "BatchError CaptureError CheckpointError GraphPPError MismatchError NoPlanError RankFailure "
    "ScheduleError SplitError",
    "graphpp.options.backend": "Custom Eager Inductor",
    "graphpp.options.debug": "Debug",
    "graphpp.options.gradients": "Gradients",
    "graphpp.options.memory": "Memory",
    "graphpp.options.microbatches": "Microbatches",
    "graphpp.options.offload": "Offload",
    "graphpp.options.parallel": "Parallel",
    "graphpp.options.recompute": "Recompute",
    "graphpp.pipeline.pipeline": "Pipeline",
    "graphpp.pipeline.profile": "Profile",
    "graphpp.pipeline.results": "EvalResult StepMetrics StepResult",
    "graphpp.planner.megatron_layout": "Layout",
    "graphpp.planner.plan": "Plan",
    "graphpp.cluster_planner.plans.found_plans": "TrainingPlans",
    "graphpp.cluster_planner.plans.plan": "plan",
    "graphpp.cluster_planner.plans.training_plan": "TrainingPlan",
    "graphpp.planner.resolve_split": "split_points",
    "graphpp.report.page_html": "html",
    "graphpp.schedules.any_form": "simulate",
    "graphpp.schedules.draw.chrome_trace": "chrome_trace",
    "graphpp.schedules.draw.svg": "svg",
    "graphpp.schedules.generate.names": "stage_ids",
    "graphpp.schedules.search.scheduler": "schedule_auto",
    "graphpp.schedules.simulate.timeline": "Event Timeline",
    "graphpp.schedules.table.costs": "Costs StageCosts",
    "graphpp.schedules.table.schedule": "Schedule",
    "graphpp.schedules.table.state_bytes": "StateBytes",
    "graphpp.verification.report": "Comparison Difference FirstDifference Verification",
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Load a public name, or a module of graphpp. Raises `AttributeError` for any other name."""
    if name not in __all__ and (name.startswith("_") or find_spec(f"{__name__}.{name}") is None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    home = _HOME_OF.get(name)
    value = import_module(f"{__name__}.{name}") if home is None else getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
