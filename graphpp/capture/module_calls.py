"""The calls of modules around a node of a trace, from torch's metadata.

Contract: this file alone knows `nn_module_stack`. A call is the module's FQN, such as `layers.0.attn`; `shared@2` is the third
call of `shared`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import fx

MODEL = "model"  # the attribute of capture's wrapper that holds the user's model
_STACK = "nn_module_stack"


def module_calls(node: fx.Node) -> tuple[str, ...]:
    """The module calls that enclose a node, outermost first."""
    stack = node.meta.get(_STACK) or node.meta.get("fwd_nn_module_stack") or {}
    found = ((key, _name(key, fqn)) for key, (fqn, _) in stack.items())
    return tuple(name for _, name in found if name)


def within_call(node: fx.Node, call: str) -> dict[str, Any]:
    """The metadata of an operation that lies directly within one of the calls around a node."""
    kept: dict[str, Any] = {}
    for key, value in (node.meta.get(_STACK) or {}).items():
        kept[key] = value
        if _name(key, value[0]) == call:
            break
    return {_STACK: kept}


def around_all(nodes: Iterable[fx.Node]) -> dict[str, Any]:
    """The metadata of an operation that lies within all calls that are around every one of these nodes."""
    stacks = [list((node.meta.get(_STACK) or {}).items()) for node in nodes if node.op.startswith("call_")]
    common = stacks[0] if stacks else []
    for stack in stacks:
        same = [mine == theirs for mine, theirs in zip(common, stack, strict=False)]
        common = common[: same.index(False) if False in same else len(same)]
    return {_STACK: dict(common)}


def _name(key: str, fqn: str) -> str:
    """The name of a call of a module of the model; empty for a call of the wrapper."""
    path, repeat = fqn.partition("@")[0], key.rpartition("@")[2] if "@" in key else ""
    return path.removeprefix(MODEL + ".") + (f"@{repeat}" if repeat else "") if path.startswith(MODEL + ".") else ""
