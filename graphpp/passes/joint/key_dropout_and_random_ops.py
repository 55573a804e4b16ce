"""Key dropout and all other random operators: each draws from a key of the microbatch, not from a generator's state.

Contract: every random operator becomes a call `seeded(key, index, operator, ...)`: `key` is the input `RandomKey`, which
`runtime/random_keys.py` fills in, and `index` numbers the random operators of the joint graph. So random numbers do not depend
on the split, the schedule or the number of ranks, and a recomputed operator repeats its numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphpp.passes.graph.joint_graph import JointGraph
from graphpp.runtime.program import RandomKey
from graphpp.runtime.random_keys import seeded


def key_random_ops(joint: JointGraph) -> JointGraph:
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
    """Whether an operator draws random numbers with these arguments; attention does so only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):
        return False
    arguments = named_arguments(operator, args, kwargs)
    if "dropout_p" in arguments:
        return bool(arguments["dropout_p"] != 0.0)
    return all(argument.name != "dropout_p" for argument in operator._schema.arguments)


def named_arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names in the operator's schema; without a schema, the keyword arguments."""
    schema = getattr(operator, "_schema", None)
    names = [argument.name for argument in schema.arguments] if schema is not None else []
    return {**dict(zip(names, args, strict=False)), **kwargs}
