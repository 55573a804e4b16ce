"""Which operations of a graph are collectives, which wait for one, and over which process group they go.

Contract: a collective is an operator that is told its process group by name (an argument `group_name`, as all functional
collectives of torch have); every rank of that group must run the same ones in the same order. So no pass makes one twice,
removes one, or moves it before or behind another of its graph. `wait_tensor` returns its own argument, which holds numbers
only then: it belongs where its collective is. The names of groups are those that this process gave them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

_GROUP = "group_name"
_WAIT = "_c10d_functional::wait_tensor"


def is_collective(node: fx.Node) -> bool:
    """Whether the operation exchanges values with other ranks, and is no wait."""
    return _group_at(node.target) is not None


def is_wait(node: fx.Node) -> bool:
    """Whether the operation waits for a collective that was started before."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name == _WAIT


def is_started(node: fx.Node) -> bool:
    """Whether a collective returns before it is done: its results are waited for."""
    return is_collective(node) and any(is_wait(user) or any(map(is_wait, user.users)) for user in node.users)


def group_of(node: fx.Node) -> str:
    """The name of a collective's process group in this process."""
    at = _group_at(node.target)
    assert at is not None, f"{node} is no collective"
    group = node.kwargs[_GROUP] if _GROUP in node.kwargs else node.args[at]
    return str(getattr(group, "group_name", group))  # torch takes the group itself, too


def names_group(node: fx.Node, argument: int | str) -> bool:
    """Whether an argument, by index or name, is the one that says the process group."""
    return is_collective(node) and argument in (_GROUP, _group_at(node.target))


def _group_at(target: Any) -> int | None:
    """The index of the operator's argument that names a process group."""
    return _group_of_operator(target) if hasattr(target, "_schema") else None


@cache  # of operators, which live as long as the process; functions and regions go with their pipeline
def _group_of_operator(target: Any) -> int | None:
    arguments = target._schema.arguments
    return next((index for index, argument in enumerate(arguments) if argument.name == _GROUP), None)
