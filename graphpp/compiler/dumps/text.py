"""The texts of a dump besides its graphs: passes, boundaries, plan, schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from graphpp.passes.graph.joint_graph import describe_node
from graphpp.passes.graph.stage_graphs import StagedGraphs
from graphpp.passes.text.naming import format_dtype
from graphpp.runtime.program import TensorMeta
from graphpp.schedules.table.schedule import Schedule
from graphpp.units import spell_bytes


@dataclass(frozen=True)
class Pass:
    """A pass that ran, and the number of files that this rank wrote after it."""

    name: str
    seconds: float
    files: int


def passes_text(passes: Sequence[Pass]) -> str:
    """One line per pass: number, name, milliseconds, and the number of this rank's files that changed."""
    lines = [
        f"{number:02d}  {item.name:<22}{1000 * item.seconds:>10.1f} ms  {item.files or '-':>5}"
        for number, item in enumerate(passes)
    ]
    return "\n".join([f"    {'pass':<22}{'time':>13}  files", *lines, ""])


def boundaries_text(cut: StagedGraphs) -> str:
    """The values that cross each boundary and that each stage saves, per microbatch, one a line."""
    makers = {node.name: node for slot in cut.graphs.values() for node in slot.graph.nodes if node.op != "placeholder"}
    lines: list[str] = []
    for boundary in cut.boundaries:
        for direction, values in (("forward", boundary.forward), ("backward", boundary.backward)):
            lines += _listed(f"boundary {boundary.stage}|{boundary.stage + 1} {direction}", values, makers)
    for stage, saved in enumerate(cut.saved):
        lines += _listed(f"saved in stage {stage}", saved, makers)
    return "\n".join(["bytes per microbatch", *lines, ""])


def _listed(title: str, values: Sequence[TensorMeta], makers: dict[str, fx.Node]) -> Iterator[str]:
    if values:
        total = spell_bytes(sum(value.nbytes for value in values))
        yield from ("", f"{title}: {len(values)} value{'s' * (len(values) != 1)}, {total}")
    width = max((len(value.name) for value in values), default=0)
    for value in values:
        facts = [f"{format_dtype(value.dtype)}{list(value.shape)}", spell_bytes(value.nbytes)]
        facts += ["needs grad"] * value.requires_grad + [f"in {describe_node(makers[value.name])}"]
        yield f"    {value.name:<{width}}  {', '.join(facts)}"


def schedule_csv(schedule: Schedule) -> str:
    """The table in torch's CSV format."""
    return "".join(",".join(str(cell or "") for cell in row) + "\n" for row in schedule.table)
