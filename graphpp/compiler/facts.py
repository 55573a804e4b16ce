"""What the ranks tell each other before they do something together, in the order in which a difference should be named.

Contract: lines of plain text that are equal on two ranks exactly if both would do the same; no path, address or value
of a parameter stands in them, but of what several ranks hold a copy of, a checksum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from graphpp.parallel.agreement import Facts
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.model_state import ModelState, checksum
from graphpp.runtime.program import Phase, PipelineProgram, StageProgram
from graphpp.schedules.table.schedule import Schedule


def of_built(joint: JointGraph, compiled: PipelineProgram, schedule: Schedule) -> Facts:
    """What was compiled from one captured graph."""
    return Facts(
        {
            "the code of the model or the loss": _code(joint),
            "the split": [f"stage {stage.index} begins with {_begins(stage)}" for stage in compiled.stages],
            "the schedule": [schedule.name, *str(schedule).splitlines()],
            "the compiled programs": _texts(compiled),
        }
    )


def of_copies(state: ModelState, shared: Sequence[str]) -> Facts:
    """Checksums of this rank's tensors that other ranks hold too: a tied parameter that starts unequal stays so."""
    return Facts({f"the values of {fqn}": [f"bits that add up to {checksum(state.tensor(fqn))}"] for fqn in shared})


def of_replica(compiled: PipelineProgram, schedule: Schedule, rank: int) -> Facts:
    """What the ranks that average their gradients must have alike."""
    local = [stage for stage in compiled.stages if schedule.rank_of_stage[stage.index] == rank]
    return Facts(
        {
            "the gradients of its stages": [f"stage {stage.index}: {fqn}" for stage in local for fqn in stage.gradients],
            "the schedule": str(schedule).splitlines()[1:],
        }
    )


def _code(joint: JointGraph) -> list[str]:
    """A line per module call of the forward: the operations right in it, in order."""
    operations: dict[str, list[str]] = {}
    for node in joint.computed():
        if not node.meta["backward"]:
            call = (node.meta["calls"] or ("what no module does",))[-1]
            operations.setdefault(call, []).append(getattr(node.target, "__name__", str(node.target)))
    return [f"{call}: {' '.join(names)}" for call, names in operations.items()]


def _texts(compiled: PipelineProgram) -> list[str]:
    return [
        f"stage {stage.index} {phase.label}, sha256 {_digest(item.source)}"
        for stage in compiled.stages
        for phase, item in (*stage.programs.items(), *([(Phase.HOIST, stage.hoisted)] if stage.hoisted else []))
    ]


def _digest(source: str) -> str:
    return hashlib.sha256(_without_comments(source).encode()).hexdigest()[:16]


def _begins(stage: StageProgram) -> str:
    return ", ".join(stage.modules[:3]) or "(no module)"


def _without_comments(text: str) -> str:
    """Comments name the sources' folders; each rank runs on a GPU of its own number, and has groups of its own."""
    lines = (line.partition("  #")[0] for line in text.splitlines())
    return "\n".join(line for line in lines if not line.startswith(("_device_", "_group_")))
