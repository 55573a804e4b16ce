"""graphpp: pipeline parallelism for an unmodified `nn.Module`, from one joint forward/backward graph.

pipe = graphpp.compile(model, loss, split=["layers.4"], schedule="1F1B", microbatches=8)
result = pipe.step(tokens, target=labels)
"""

from graphpp import schedules
from graphpp.api import compile
from graphpp.backend import Inductor
from graphpp.errors import (
    BatchError,
    CaptureError,
    GraphPPError,
    MismatchError,
    RankFailure,
    ScheduleError,
    SplitError,
)
from graphpp.layout import Layout
from graphpp.offload import Offload
from graphpp.pipeline import EvalResult, Pipeline, StepResult
from graphpp.plan import Plan
from graphpp.post_validation import PostValidation
from graphpp.recompute import Recompute
from graphpp.runtime.costs import Costs, StageCosts
from graphpp.runtime.profile import Profile
from graphpp.runtime.schedule import Schedule
from graphpp.runtime.scheduler import schedule_auto
from graphpp.runtime.schedules import stage_ids
from graphpp.runtime.simulator import simulate
from graphpp.runtime.timeline import Event, Timeline
from graphpp.signature import Microbatch, whole
from graphpp.split import split_points
from graphpp.verify import verify
from graphpp.verify_report import Comparison, Difference, Parting, Verification

__all__ = [
    "BatchError",
    "CaptureError",
    "Comparison",
    "Costs",
    "Difference",
    "EvalResult",
    "Event",
    "GraphPPError",
    "Inductor",
    "Layout",
    "Microbatch",
    "MismatchError",
    "Offload",
    "Parting",
    "Pipeline",
    "Plan",
    "PostValidation",
    "Profile",
    "RankFailure",
    "Recompute",
    "Schedule",
    "ScheduleError",
    "SplitError",
    "StageCosts",
    "StepResult",
    "Timeline",
    "Verification",
    "compile",
    "schedule_auto",
    "schedules",
    "simulate",
    "split_points",
    "stage_ids",
    "verify",
    "whole",
]
