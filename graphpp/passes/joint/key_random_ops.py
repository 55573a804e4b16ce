"""Randomize: random operators take their numbers from a key of the microbatch, not from a generator's state.

Contract: afterwards every operator that draws random numbers is a call of `seeded(key, index, operator, ...)`: `key` is the
input `RandomKey`, `index` the operator's number among the random ones of the joint graph. So its numbers are the same
whatever the split, the schedule and the number of ranks, and running it again repeats them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.program import RandomKey
from graphpp.runtime.randomness import seeded


def key_random_ops(joint: JointGraph) -> JointGraph:
    """Give every random operator its key, in place."""
    drawing = [node for node in joint.computed() if draws_random_numbers(node.target, node.args, node.kwargs)]
    if not drawing:
        return joint
    with joint.graph.inserting_before(next(iter(joint.graph.nodes))):
        key = joint.graph.placeholder("random_key")
    key.meta = {"val": 0, "backward": False, "role": RandomKey()}
    for index, node in enumerate(drawing):
        node.args = (key, index, node.target, *node.args)  # type: ignore[arg-type]
        node.target = seeded
    return joint


def draws_random_numbers(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operator draws random numbers with these arguments."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    schema = getattr(operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return given.get("dropout_p") != 0.0 if "dropout_p" in given else "dropout_p" not in names
