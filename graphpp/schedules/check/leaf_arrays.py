"""The single actions of a table as arrays of integers, one entry for each, in the order of the ranks' rows.

Contract
    `leaf_arrays(schedule)` returns None for a table with a number that is no integer of 32 bits, or with an action whose parts
    are not those of its kind: such a table has no arrays. Otherwise entry `i` of every array belongs to the same single
    action: a part of an overlap or of a batch has an entry of its own, idle cells have none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from graphpp.schedules.table.actions import WITH_PARTS, Action, Kind, has_right_parts
from graphpp.schedules.table.schedule import Schedule

Integers = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]

CODE = {kind: code for code, kind in enumerate(Kind)}
"""The number of each kind in `LeafArrays.kind`."""

_MOST = int(np.iinfo(np.int32).max)
NO_MICROBATCH = -_MOST


class LeafArrays(NamedTuple):
    """Kind, stage, microbatch, rank and column of each single action, and the entry at which its cell begins."""

    kind: Integers
    stage: Integers
    microbatch: Integers
    """`NO_MICROBATCH` where an action has none."""
    rank: Integers
    column: Integers
    head: Integers

    def of_kind(self, *kinds: Kind) -> Flags:
        """Whether each action is of one of `kinds`."""
        wanted = np.zeros(len(CODE), dtype=np.bool_)
        wanted[[CODE[kind] for kind in kinds]] = True
        return wanted[self.kind]


def leaf_arrays(schedule: Schedule) -> LeafArrays | None:
    """The arrays of a table; None if it holds a number or a form of action that they cannot represent."""
    rows: list[tuple[Integers, ...]] = []
    for row in schedule.table:
        arrays = _of_row(row)
        if arrays is None:
            return None
        rows.append(arrays)
    empty = (np.zeros(0, dtype=np.int32),) * 5
    kind, stage, microbatch, column, size = (np.concatenate(each) for each in zip(empty, *rows, strict=True))
    rank = np.repeat(np.arange(len(rows), dtype=np.int32), [len(row[0]) for row in rows])
    heads = (np.cumsum(size) - size).astype(np.int32)
    return LeafArrays(kind, stage, microbatch, rank, column, np.repeat(heads, size))


def _of_row(row: Sequence[Action | None]) -> tuple[Integers, ...] | None:
    """Kind, stage, microbatch and column of each single action of a row, and the number of them in each cell."""
    cells = [action for action in row if action is not None]
    if any(action.parts or action.kind in WITH_PARTS for action in cells):
        if not all(has_right_parts(action) for action in cells):
            return None
        leaves = [leaf for action in cells for leaf in action.leaves]
        sizes = [len(action.leaves) for action in cells]
        columns = [column for column, action in enumerate(row) if action is not None for _ in action.leaves]
    else:
        leaves, sizes = cells, [1] * len(cells)
        columns = [column for column, action in enumerate(row) if action is not None]
    found = (
        [CODE[leaf.kind] for leaf in leaves],
        [leaf.stage for leaf in leaves],
        [NO_MICROBATCH if leaf.microbatch is None else leaf.microbatch for leaf in leaves],
        columns,
        sizes,
    )
    arrays = [np.array(each) if each else np.zeros(0, dtype=np.int32) for each in found]
    if any(array.dtype.kind != "i" or abs(array).max(initial=0) > _MOST for array in arrays):
        return None
    return tuple(array.astype(np.int32) for array in arrays)
