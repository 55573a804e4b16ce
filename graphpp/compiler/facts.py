"""The facts that ranks compare before a call, in the order in which an error reports a difference.

Facts are lines of plain text, equal on two ranks exactly if both would run the same. They contain no paths, addresses or
parameter values, but checksums of parameters that several ranks have.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from graphpp.parallel.checksum import checksum
from graphpp.parallel.facts import Facts
from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.planner.tables import CheckedTable
from graphpp.runtime.program import Phase, PipelineProgram, StageProgram


def of_graph(joint: JointGraph, program: PipelineProgram) -> Facts:
    """Facts about a captured graph and its stage programs."""
    begins = {stage.index: ", ".join(stage.modules[:3]) or "(no module)" for stage in program.stages}
    split = [f"stage {index} begins with {modules}" for index, modules in begins.items()]
    return Facts(
        {"the code of the model or the loss": _code(joint), "the split": split, "the compiled programs": _texts(program)}
    )


def of_call(graphs: Sequence[Facts], table: CheckedTable) -> Facts:
    """Facts about a call: those of its graphs in order, and its table."""
    names = ("the code of the model or the loss", "the split")
    lines = {name: [line for graph in graphs for line in graph.lines[name]] for name in names}
    programs = [line for graph in graphs for line in graph.lines["the compiled programs"]]
    return Facts(lines | {"the schedule": [table.plain.name, *table.text], "the compiled programs": programs})


def of_copies(copies: Mapping[str, torch.Tensor]) -> dict[str, list[str]]:
    """Checksums of this rank's tensors that other ranks read too (`CompiledGraph.copies`): they must start equal."""
    return {f"the values of {name}": [f"bits that add up to {checksum(copy)}"] for name, copy in copies.items()}


def of_replica(stages: Sequence[StageProgram], table: CheckedTable) -> Facts:
    """Facts that ranks which average the gradients of these stages must agree on."""
    gradients = [f"stage {stage.index}: {fqn}" for stage in stages for fqn in stage.gradients]
    written = [f"stage {stage.index}: {fqn}" for stage in stages for fqn in stage.written_buffers]
    return Facts({"the gradients of its stages": gradients, "the buffers that it writes": written, "the schedule": table.text})


def of_layers(programs: Sequence[PipelineProgram], stages: Sequence[int]) -> dict[str, list[str]]:
    """The order of layer gathers and reductions, equal on ranks that share shards; repeated only if a microbatch differs."""
    found, before = list[str](), list[str]()
    for microbatch, pipeline in enumerate(programs):
        items = [item for stage in stages for item in pipeline.stages[stage].programs.values() if item.layers is not None]
        lines = [f"stage {item.stage} {item.phase.label}: {line}" for item in items for line in (item.layers.order)]  # type: ignore[union-attr]
        found += [f"from microbatch {microbatch} on, {line}" for line in lines] if lines != before else []
        before = lines
    what = (
        "the order in which programs gather and reduce layers, which parallel.keep=0 needs alike (give all ranks of dp_shard "
        "microbatches of one shape, or take keep=1)"
    )
    return {what: found}


def _code(joint: JointGraph) -> list[str]:
    """A line per module call of the forward: its own operations, in order."""
    operations: dict[str, list[str]] = {}
    for node in joint.computed():
        if not node.meta["backward"]:
            call = (node.meta["calls"] or ("what no module does",))[-1]
            operations.setdefault(call, []).append(getattr(node.target, "__name__", str(node.target)))
    return [f"{call}: {' '.join(names)}" for call, names in operations.items()]


def _texts(compiled: PipelineProgram) -> list[str]:
    return [
        f"stage {stage.index} {phase.label}, sha256 {hashlib.sha256(_code_of(item.source)).hexdigest()[:16]}"
        for stage in compiled.stages
        for phase, item in (*stage.programs.items(), *([(Phase.HOIST, stage.hoisted)] if stage.hoisted else []))
    ]


def _code_of(text: str) -> bytes:
    """The text without comments, which contain paths, and without lines that name this rank's GPU and groups."""
    lines = (line.partition("  #")[0] for line in text.splitlines())
    return "\n".join(line for line in lines if not line.startswith(("_device_", "_group_"))).encode()
