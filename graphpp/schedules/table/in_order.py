"""Run the rows of a table together, each rank as far as its inputs have arrived: the loop of every pass that follows data.

The caller records the results of a cell before it asks for the next pair. `ready` is called right before a cell is yielded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from graphpp.errors import ScheduleError
from graphpp.schedules.table.actions import Action, upstream

T = TypeVar("T")


class Stuck(ScheduleError, Generic[T]):  # noqa: N818 - it names a state of the rows
    """No rank can go on; `heads` has the next cell of each rank that is not at its end."""

    def __init__(self, heads: Mapping[int, T]) -> None:
        super().__init__(f"no rank can go on: they stop at {', '.join(map(str, heads.values()))}")
        self.heads = heads


def in_order(rows: Iterable[Iterable[T]], ready: Callable[[int, T], bool]) -> Iterator[tuple[int, T]]:
    """Yield (rank, cell), in every round at most one cell of each rank. Raises `Stuck` if a round yields none."""
    todo = [deque(row) for row in rows]
    while any(todo):
        moved = False
        for rank, rest in enumerate(todo):
            if rest and ready(rank, rest[0]):
                moved = True
                yield rank, rest.popleft()
        if not moved:
            raise Stuck({rank: rest[0] for rank, rest in enumerate(todo) if rest})


def has_inputs(action: Action, results: Container[Action], stages: int) -> bool:
    """Whether `results` has every value that `action` reads from its neighbouring stages."""
    for leaf in action.leaves:
        makers = upstream(leaf, stages)
        if makers and not any(maker in results for maker in makers):
            return False
    return True
