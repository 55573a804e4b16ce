"""One order of the operations of all ranks: the form in which the search moves single operations and messages.

A sequence has the computations of all ranks, and the messages between them if they occupy ranks (`with_messages`). Each element
comes after the elements that it reads. A message is one element, with the number of its SEND, at the same place in the rows of
both its ranks. So no two ranks wait for each other, even if a send waits for its receive. Every table that `check` accepts has
such a sequence, unless it has batches of messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from graphpp.schedules.search.candidate import Candidate
from graphpp.schedules.search.problem import Problem
from graphpp.schedules.table.in_order import in_order


@dataclass(frozen=True, eq=False)
class Elements:
    """The elements of a sequence. `ranks[element]`: its rank, or the ranks of its SEND and its RECV.

    `before[element]`: the nearest elements that precede it in every sequence, in the data flow or in the order of microbatches;
    `after` is the inverse. The W of a split backward may precede the W of an earlier microbatch.
    """

    problem: Problem
    ranks: Sequence[tuple[int, ...]]
    before: Sequence[tuple[int, ...]]
    after: Sequence[tuple[int, ...]]

    @classmethod
    def of(cls, problem: Problem) -> Elements:
        """The elements of a problem, with or without messages."""
        count, step = problem.count, problem.microbatches
        ranks: list[tuple[int, ...]] = [(problem.rank_of(op),) for op in range(3 * count)]
        before: list[tuple[int, ...]] = []
        for element in range(5 * count if problem.messages else 3 * count):
            needs = problem.reads[element]
            if element >= 3 * count:
                ranks.append((problem.rank_of(needs), problem.rank_of(element - 3 * count)) if needs >= 0 else ())
            needs -= 2 * count * (needs >= 5 * count)  # a RECV is at the place of its SEND
            earlier = [element - 1] if element % step else []
            before.append((*earlier, *([needs] if needs >= 0 else [])))
        after: list[list[int]] = [[] for _ in before]
        for element, others in enumerate(before):
            for other in others:
                after[other].append(element)
        return cls(problem, ranks, before, list(map(tuple, after)))

    @cached_property
    def operations(self) -> Sequence[Sequence[tuple[int, int, int, float]]]:
        """By element its operations, of a message two: the number, the rank, the operation that it reads, and the lag."""
        problem, receive = self.problem, 2 * self.problem.count
        each = ([(element + at * receive, rank) for at, rank in enumerate(ranks)] for element, ranks in enumerate(self.ranks))
        return [[(op, rank, problem.reads[op], problem.lag[op]) for op, rank in ops] for ops in each]

    def rows(self, sequence: Iterable[int]) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(self.problem.ranks)]
        receive = 2 * self.problem.count
        for element in sequence:
            first, *other = self.ranks[element]
            rows[first].append(element)
            if other:
                rows[other[0]].append(element + receive)
        return rows

    def sequence(self, rows: Sequence[Sequence[int]], candidate: Candidate) -> list[int]:
        """The sequence of rows of computations; a message follows its maker, or its maker's pair, as in `add_send_recv`."""
        found, done = list[int](), bytearray(len(self.before))
        cells = (_cells(candidate, row) for row in rows)
        for _, cell in in_order(cells, lambda _, cell: all(done[need] for op in cell for need in self.reads[op])):
            for each in (*cell, *(self.sends[op] for op in reversed(cell) if op in self.sends)):
                found.append(each)
                done[each] = 1
        return found

    @cached_property
    def reads(self) -> Sequence[tuple[int, ...]]:
        """The element that each computation reads, if any: a message, or a computation of its rank."""
        count, reads = self.problem.count, self.problem.reads[: 3 * self.problem.count]
        return [(need - 2 * count if need >= 5 * count else need,) if need >= 0 else () for need in reads]

    @cached_property
    def sends(self) -> Mapping[int, int]:
        """By operation, the message with its result, if another rank reads the result."""
        messages = range(3 * self.problem.count, len(self.before))
        return {self.problem.reads[message]: message for message in messages if self.ranks[message]}

    def sorted(self, sequence: Iterable[int], key: Callable[[int], float], *, late: bool = False) -> list[int]:
        """The elements by their keys; an element comes after the elements that must precede it.

        If keys and data flow disagree, the preceding elements move earlier; with `late`, the element moves later.
        """
        needs = self.after if late else self.before
        todo = sorted(sequence, key=key, reverse=not late)
        left, found = bytearray(len(needs)), list[int]()
        for element in todo:
            left[element] = 1
        while todo:
            element = todo[-1]
            if left[element]:
                missing = [each for each in needs[element] if left[each]]
                if missing:
                    todo += missing
                    continue
                found.append(element)
                left[element] = 0
            todo.pop()
        return found[::-1] if late else found


def _cells(candidate: Candidate, row: Sequence[int]) -> list[tuple[int, ...]]:
    """The operations of a row, each alone or as a pair of a backward and its forward."""
    if not candidate.beside:
        return [(op,) for op in row]
    cells: list[tuple[int, ...]] = []
    for op in row:
        paired = bool(cells) and candidate.mate(cells[-1][-1], op)
        cells.append((*cells.pop(), op) if paired else (op,))
    return cells
