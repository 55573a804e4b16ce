"""Recognise the collectives of a graph, the waits for them, and their process groups.

Contract: a collective is an operator with an argument `group_name` (torch's functional collectives) or `pg_name` (the gathers
of torch's context parallelism). Every rank of the group must run the same collectives in the same order. So no pass duplicates
or removes a collective, or reorders two collectives of one graph; only `joint/gradient_sums.py` hands some to the runtime, on
all ranks of their group. `wait_tensor` returns its argument, which is valid only after the wait, so it stays in the stage of
its collective. Ranks may have different names for a group.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import fx

_GROUPS = ("group_name", "pg_name")
_WAIT = "_c10d_functional::wait_tensor"


def is_collective(node: fx.Node) -> bool:
    """Whether the operation starts an exchange of values with other ranks; a wait does not."""
    return _group_at(node.target) is not None


def is_wait(node: fx.Node) -> bool:
    """Whether the operation waits for a collective that an earlier node started."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.name == _WAIT


def is_started(node: fx.Node) -> bool:
    """Whether a collective is asynchronous: a node waits for its result, or for an item of it."""
    return is_collective(node) and any(is_wait(user) or any(map(is_wait, user.users)) for user in node.users)


def group_of(node: fx.Node) -> str:
    """The name of a collective's process group in this process."""
    at = _group_at(node.target)
    assert at is not None, f"{node} is no collective"
    named = [node.kwargs[name] for name in _GROUPS if name in node.kwargs]
    group = named[0] if named else node.args[at]
    return str(getattr(group, "group_name", group))  # torch also takes the group itself


def names_group(node: fx.Node, argument: int | str) -> bool:
    return is_collective(node) and argument in (*_GROUPS, _group_at(node.target))


def _group_at(target: Any) -> int | None:
    return _group_of_operator(target) if hasattr(target, "_schema") else None


@cache  # for operators only, which live as long as the process: the cache would keep functions and regions alive
def _group_of_operator(target: Any) -> int | None:
    arguments = target._schema.arguments
    return next((index for index, argument in enumerate(arguments) if argument.name in _GROUPS), None)
