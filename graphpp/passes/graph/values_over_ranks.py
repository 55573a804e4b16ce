"""Which values of a graph differ between ranks that share the layers of a model (tensor parallelism).

Contract: ranks compute equal values if they run one operator with equal arguments. A value differs if it is a sharded
parameter, is computed from a differing value, or by an operator whose plain arguments differ between ranks, such as the index
of a chunk (ranks compare `plain_arguments`). An all-reduce or all-gather over the ranks makes values equal. Other collectives
over some of the ranks, such as an all-to-all, give each rank other values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

import torch
from torch import fx

from graphpp.passes.graph.collectives import group_of, is_collective, names_group
from graphpp.runtime.program import Buffer, Parameter

_EQUAL_AFTER = ("all_reduce", "all_gather_into_tensor", "broadcast")


def plain_arguments(graph: fx.Graph) -> list[int]:
    """For each node a 63-bit number, equal on two ranks for equal operators with equal plain arguments."""
    return [_number(node) for node in graph.nodes]


def unlike_numbers(own: Sequence[int], of_ranks: Sequence[Sequence[int]]) -> set[int]:
    """The indices of `own` numbers that a rank lacks at that position; ranks may have additional nodes, such as padding."""
    unlike: set[int] = set()
    for theirs in of_ranks:
        if len(theirs) == len(own):
            unlike |= {at for at, (mine, other) in enumerate(zip(own, theirs, strict=True)) if mine != other}
        else:
            blocks = SequenceMatcher(None, own, theirs, autojunk=False).get_matching_blocks()
            unlike |= set(range(len(own))).difference(*(range(block.a, block.a + block.size) for block in blocks))
    return unlike


def differing_values(
    graph: fx.Graph, sharded: Collection[str], unlike: Collection[int], groups: Mapping[str, bool]
) -> set[fx.Node]:
    """The nodes whose values differ between some ranks.

    `sharded`: FQNs of the parameters and buffers that differ between ranks. `unlike`: the indices of the nodes whose plain
    arguments differ. `groups`: the names of the process groups that have several of the ranks, and whether they have all.
    """
    found: set[fx.Node] = set()
    for index, node in enumerate(graph.nodes):
        role = node.meta.get("role")
        spread = isinstance(role, Parameter | Buffer) and role.fqn in sharded
        all_of_them = groups.get(group_of(node)) if is_collective(node) else None
        inherited = any(source in found for source in _sources(node))
        if all_of_them is not None:
            inherited = not _makes_equal(node) or (inherited and not all_of_them)
        if spread or inherited or index in unlike:
            found.add(node)
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values a node reads; `copy` reads only the shape of the tensor into which it copies."""
    return node.all_input_nodes[-1:] if node.target is torch.ops.aten.copy.default else node.all_input_nodes


def _makes_equal(node: fx.Node) -> bool:
    return str(getattr(node.target, "_opname", "")).startswith(_EQUAL_AFTER)


def _number(node: fx.Node) -> int:
    args = [None if names_group(node, at) else value for at, value in enumerate(node.args)]
    kwargs = {key: None if names_group(node, key) else value for key, value in node.kwargs.items()}
    target = "" if node.op == "placeholder" else getattr(node.target, "__qualname__", str(node.target))
    text = repr((node.op, target, fx.node.map_aggregate((args, kwargs), _plain)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _plain(value: Any) -> Any:
    """Part of an argument: nodes are alike, and so are the devices of one type."""
    return "node" if isinstance(value, fx.Node) else value.type if isinstance(value, torch.device) else value
