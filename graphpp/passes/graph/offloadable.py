"""Find the saved values of a forward that may be evicted from the device until the backward, and the memory this frees.

Contract: a saved value may be evicted if nothing that stays on the device shares its memory: no parameter, buffer, input or
constant, no other saved value, no result that the caller keeps, and no value that a neighbouring stage on the same rank sent
or receives. A value sent to another rank may be evicted, because the transport keeps its message.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from torch import fx

from graphpp.passes.graph.aliases import root
from graphpp.passes.graph.joint_graph import is_tensor, results_of, tensor_meta
from graphpp.runtime import program
from graphpp.runtime.program import OutputRole, TensorMeta


class Offloadable(NamedTuple):
    """A saved value; `nbytes`: the device memory that evicting it frees, of which the value may be a part.

    `memory`: the node that allocated this memory. `received`: the stage below made it; `sent`: the stage above reads it.
    """

    meta: TensorMeta
    nbytes: int
    memory: fx.Node
    received: bool
    sent: bool


class LocalNeighbours(NamedTuple):
    """Whether the stage below, and the stage above, run on the same rank."""

    below: bool
    above: bool


def offloadable(forward: fx.Graph, local: LocalNeighbours) -> list[Offloadable]:
    """The saved results of a stage's forward that may be evicted, in the order of the results; `meta` has the saved names."""
    results: dict[fx.Node, list[tuple[OutputRole, fx.Node]]] = defaultdict(list)
    for role, node in results_of(forward):
        if is_tensor(node):
            results[root(node)].append((role, node))
    return [
        Offloadable(tensor_meta(node, role.name), tensor_meta(base).nbytes, base, base.op == "placeholder", len(sharers) > 1)
        for base, sharers in results.items()
        if _is_own(base, local)
        for role, node in _only_saved(sharers, local)
    ]


def _is_own(memory: fx.Node, local: LocalNeighbours) -> bool:
    """Whether only this stage holds the memory: the forward allocated it, or received it from another rank."""
    if memory.op == "placeholder":
        return isinstance(memory.meta["role"], program.Received) and not local.below
    return is_tensor(memory)


def _only_saved(sharers: list[tuple[OutputRole, fx.Node]], local: LocalNeighbours) -> list[tuple[program.Saved, fx.Node]]:
    """The single saved value among the results in one memory, if all other results are messages to another rank."""
    saved = [(role, node) for role, node in sharers if isinstance(role, program.Saved)]
    others = [role for role, _ in sharers if not isinstance(role, program.Saved)]
    leave = all(isinstance(role, program.Sent) for role in others) and not (others and local.above)
    return saved if len(saved) == 1 and leave else []
