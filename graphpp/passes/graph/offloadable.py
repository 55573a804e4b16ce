"""Which saved values of a forward may leave the device until their backward, and what memory that frees.

Contract: a value may leave if nothing else that stays has its memory: no parameter, buffer, input or constant, no other
saved value, no result that the caller keeps, nothing that a neighbouring stage on the same rank was given or gave. What
is sent to another rank may leave: its message goes on its way by itself. The bytes are those of the memory in which the
value lies, of which the value may be a part.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torch import fx

from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.joint_graph import is_tensor, tensor_meta
from graphpp.runtime import program
from graphpp.runtime.program import OutputRole, TensorMeta


class Offloadable(NamedTuple):
    """A value, and the bytes that are free while it is away."""

    meta: TensorMeta
    nbytes: int


class LocalNeighbours(NamedTuple):
    """Whether the stage below, and the one above, is on the same rank."""

    below: bool
    above: bool


def offloadable(forward: fx.Graph, beside: LocalNeighbours) -> list[Offloadable]:
    """The saved results of a stage's forward that may leave, in the order of the results; `meta` has the saved names."""
    results: dict[fx.Node, list[tuple[OutputRole, fx.Node]]] = defaultdict(list)
    end = forward.output_node()
    for role, node in zip(end.meta["roles"], end.args[0], strict=True):  # type: ignore[arg-type]
        if is_tensor(node):
            results[root(node)].append((role, node))
    return [
        Offloadable(tensor_meta(node, role.name), tensor_meta(memory).nbytes)
        for memory, sharers in results.items()
        if _is_own(memory, beside)
        for role, node in _alone(sharers, beside)
    ]


def _is_own(memory: fx.Node, beside: LocalNeighbours) -> bool:
    """Whether only this microbatch of this stage holds a memory: one that it made, or that was received for it."""
    if memory.op == "placeholder":
        return isinstance(memory.meta["role"], program.Received) and not beside.below
    return is_tensor(memory)


def _alone(sharers: list[tuple[OutputRole, fx.Node]], beside: LocalNeighbours) -> list[tuple[program.Saved, fx.Node]]:
    """The saved one of the results in one memory, if all others are messages to another rank."""
    saved = [(role, node) for role, node in sharers if isinstance(role, program.Saved)]
    sent = [role for role, _ in sharers if isinstance(role, program.Sent)]
    alone = len(saved) == 1 and len(saved) + len(sent) == len(sharers) and not (sent and beside.above)
    return saved if alone else []
