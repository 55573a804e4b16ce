"""Prove on arrays that no action of a table waits for itself: the graph of waits of `graphpp.schedules.check.deadlock`.

Contract
    A node is a number: a cell of computations is the first of its entries in the arrays, a message is the entry of its send,
    and the end of the n-th batch of messages is the number of entries plus n. The end of a single message is the message.
    The edges (before, after) are those of `deadlock.waits`, with one node for the end of a batch in place of an edge to each
    of its messages. Kahn's algorithm takes away nodes that wait for none that is left. A cycle exists if a node is left over.
"""

from __future__ import annotations

import numpy as np

from graphpp.schedules.check.leaf_arrays import Integers, LeafArrays
from graphpp.schedules.table.actions import COMMUNICATION

_NO_MESSAGES = np.zeros(0, dtype=np.int32)
_NONE = np.int32(-1)


def runs_to_its_end(
    leaves: LeafArrays,
    made: Integers,
    read: Integers,
    sends: Integers = _NO_MESSAGES,
    receives: Integers = _NO_MESSAGES,
    readers: Integers = _NO_MESSAGES,
) -> bool:
    """Whether every node of the graph of waits can run.

    `made` and `read`: the entries of computations, the second of which reads the result of the first without a message.
    `sends`, `receives` and `readers`: for each message its two entries and that of the computation that reads it.
    """
    edges, nodes = _edges(leaves, made, read, sends, receives, readers)
    return _acyclic(*(np.concatenate(side) for side in zip(*edges, strict=True)), nodes=nodes)


def _edges(
    leaves: LeafArrays, made: Integers, read: Integers, sends: Integers, receives: Integers, readers: Integers
) -> tuple[list[tuple[Integers, Integers]], int]:
    """The (before, after) nodes of every edge, and the number of nodes."""
    count = len(leaves.kind)
    entry = np.arange(count, dtype=np.int32)
    is_message = leaves.of_kind(*COMMUNICATION)
    node = leaves.head.copy()
    node[sends], node[receives] = sends, sends
    batched = np.flatnonzero(is_message & (np.bincount(leaves.head, minlength=count)[leaves.head] > 1))
    batches, batch = np.unique(leaves.head[batched], return_inverse=True)
    end = node.copy()
    end[batched] = count + batch
    edges = [(node[made], node[read]), (end[receives], node[readers]), (node[batched], end[batched])]
    computation_before = _latest(leaves, np.where(is_message, _NONE, entry))
    message_before = np.where(is_message, _latest(leaves, np.where(is_message, entry, _NONE)), _NONE)
    for before in (computation_before, message_before):
        waits = before != _NONE
        edges.append((end[before[waits]], node[waits]))
    return edges, count + len(batches)


def _latest(leaves: LeafArrays, chosen: Integers) -> Integers:
    """For each entry the latest chosen entry of an earlier cell of its rank; -1 where there is none.

    `chosen` holds, at each entry, the entry itself or -1.
    """
    until = np.maximum.accumulate(np.concatenate([[_NONE], chosen]))
    found: Integers = until[leaves.head]  # `until[n]` is the latest chosen entry below n
    same_rank = (found != _NONE) & (leaves.rank[found] == leaves.rank)
    return np.where(same_rank, found, _NONE)


def _acyclic(before: Integers, after: Integers, *, nodes: int) -> bool:
    """Whether the graph with these edges has no cycle: Kahn's algorithm."""
    waited, waits = np.bincount(before, minlength=nodes), np.bincount(after, minlength=nodes)
    used = (waited > 0) | (waits > 0)
    start = np.concatenate([[0], np.cumsum(waited)]).data
    followers = after[np.argsort(before, kind="stable")].data
    waiting = waits.tolist()
    ready = np.flatnonzero(used & (waits == 0)).tolist()
    left = np.count_nonzero(used)
    while ready:
        node = ready.pop()
        left -= 1
        for follower in followers[start[node] : start[node + 1]]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)
    return not left
