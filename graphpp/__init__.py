"""graphpp: pipeline parallelism for an unmodified `nn.Module`, from one joint forward/backward graph.

pipe = graphpp.compile(model, loss, split=["layers.4"], schedule="1F1B", microbatches=8)
result = pipe.step(tokens, target=labels)
"""

from graphpp import attention, cache, devices, experts, schedules
from graphpp.api import compile, verify
from graphpp.batch.microbatch import Microbatch, absent, whole
from graphpp.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    GraphPPError,
    MismatchError,
    RankFailure,
    ScheduleError,
    SplitError,
)
from graphpp.options.backend import Custom, Eager, Inductor
from graphpp.options.debug import Debug
from graphpp.options.gradients import Gradients
from graphpp.options.memory import Memory
from graphpp.options.offload import Offload
from graphpp.options.parallel import Parallel
from graphpp.options.recompute import Recompute
from graphpp.pipeline.pipeline import Pipeline
from graphpp.pipeline.profile import Profile
from graphpp.pipeline.results import EvalResult, StepResult
from graphpp.planner.megatron_layout import Layout
from graphpp.planner.plan import Plan
from graphpp.planner.plans.found_plans import TrainingPlans
from graphpp.planner.plans.plan import plan
from graphpp.planner.plans.training_plan import TrainingPlan
from graphpp.planner.resolve_split import split_points
from graphpp.planner.search_plans import PlanCandidate, PlanSearch, plan_auto
from graphpp.schedules.any_form import simulate
from graphpp.schedules.draw.pictures import chrome_trace, html, svg
from graphpp.schedules.generate.names import stage_ids
from graphpp.schedules.search.scheduler import schedule_auto
from graphpp.schedules.simulate.timeline import Event, Timeline
from graphpp.schedules.table.costs import Costs, StageCosts
from graphpp.schedules.table.schedule import Schedule
from graphpp.schedules.table.state_bytes import StateBytes
from graphpp.timed_stages import stage_costs
from graphpp.verification.report import Comparison, Difference, FirstDifference, Verification

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
    "MismatchError",
    "Offload",
    "Parallel",
    "Pipeline",
    "Plan",
    "PlanCandidate",
    "PlanSearch",
    "Profile",
    "RankFailure",
    "Recompute",
    "Schedule",
    "ScheduleError",
    "SplitError",
    "StageCosts",
    "StateBytes",
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
    "plan_auto",
    "schedule_auto",
    "schedules",
    "simulate",
    "split_points",
    "stage_costs",
    "stage_ids",
    "svg",
    "verify",
    "whole",
]
