"""The steps of local search that move single computations and messages of a sequence; and steps towards fewer bytes.

A step moves one element behind or before another one of its rank, with the elements between them that depend on it; or it
shifts successive elements of a microbatch on all their ranks; or it makes a backward whole or split, or pairs a backward with a
forward. `save_bytes` keeps the makespan and lowers the ranks' bytes. Few steps lower a rank's peak, so among equal peaks the
sequence with fewer bytes alive after its operations is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, islice
from random import Random

from graphpp.schedules.search.candidate import Candidate, operation_costs, pair_costs, peaks
from graphpp.schedules.search.evaluate_sequence import Sequenced, evaluate_sequence
from graphpp.schedules.search.sequence import Elements

_FARTHEST = 10
"""Places by which one step moves an element in the row of its rank."""

_Neighbour = tuple[Candidate, list[int]]


def save_bytes(start: Sequenced, steps: int, random: Random) -> Sequenced:
    """Take `steps` steps; the result ends no later, and its ranks need no more bytes in sum."""
    moves, latest = Moves(start.elements, random), start.makespan * (1 + 1e-10)
    best, least = start, _bytes(start)
    for _ in range(steps):
        moved = moves.step(best, 2 * latest)
        if moved and moved.makespan <= latest:
            needed = _bytes(moved)
            if needed <= least:
                best, least = moved, needed
    return best


def _bytes(solution: Sequenced) -> tuple[int, int]:
    """The sum of the ranks' peaks, and the sum of the bytes alive after each operation."""
    problem, candidate, rows = solution.problem, solution.candidate, solution.solution.orders
    costs = pair_costs(problem, candidate, rows)[0] if candidate.beside else operation_costs(problem, bytes(candidate.whole))
    alive = sum(sum(accumulate(map(costs.change.__getitem__, row))) for row in rows)
    return sum(peaks(problem, candidate, rows)), alive


class Moves:
    def __init__(self, elements: Elements, random: Random) -> None:
        self.elements, self.problem, self.random = elements, elements.problem, random
        self.flips = [stage for stage in range(self.problem.stages) if self.problem.prefers_whole(stage)]

    def step(self, current: Sequenced, limit: float) -> Sequenced | None:
        neighbour = self.neighbour(current)
        return evaluate_sequence(self.elements, *neighbour, limit) if neighbour else None

    def neighbour(self, old: Sequenced) -> _Neighbour | None:
        """Another sequence, or other forms of backwards; None if nothing changes."""
        luck, candidate = self.random.random(), old.candidate
        if luck < 0.15 and self.flips:
            return self._flip(old)
        if luck < 0.3 and self.problem.pairs:
            return self._pair(old)
        move = self._piece if luck < 0.45 else self._exchange if luck < 0.6 else self._single
        moved = move(old.sequence)
        return (candidate, moved) if moved != old.sequence else None

    def _flip(self, old: Sequenced) -> _Neighbour:
        """Make backwards of successive microbatches whole, or split them, with the weight gradients some places later."""
        problem, whole = self.problem, bytearray(old.candidate.whole)
        stage = self.random.choice(self.flips) * problem.microbatches
        first = self.random.randrange(problem.microbatches)
        last = first + 1 if self.random.random() < 0.7 else self.random.randint(first + 1, problem.microbatches)
        flipped = range(stage + first, stage + last)
        gone, come = ([x for x in flipped if whole[x] == form] for form in (0, 1))
        for x in flipped:
            whole[x] ^= 1
        sequence: list[int] = []
        for element in old.sequence:
            kind, x = divmod(element, problem.count)
            if kind != 2 or x not in gone:
                sequence.append(element)
            if kind == 1 and x in come:
                sequence.append(element + problem.count)
        left = int(_FARTHEST * self.random.random() * self.random.random())
        for x in come if left else ():
            at = sequence.index(2 * problem.count + x)
            sequence = _moved(self.elements, sequence, at, self.elements.ranks[sequence[at]][0], left)
        return replace(old.candidate, whole=whole), sequence

    def _single(self, sequence: list[int]) -> list[int]:
        """Move an element by some places in a rank's row, with the elements in between that depend on it."""
        at = self.random.randrange(len(sequence))
        rank = self.random.choice(self.elements.ranks[sequence[at]])
        left = 1 + int(_FARTHEST * self.random.random() * self.random.random())
        return _moved(self.elements, sequence, at, rank, left if self.random.random() < 0.5 else -left)

    def _exchange(self, sequence: list[int]) -> list[int]:
        """Exchange two elements of a rank's row, which may reach places that neither could reach alone."""
        at = self.random.randrange(len(sequence))
        rank = self.random.choice(self.elements.ranks[sequence[at]])
        apart = 1 + int(_FARTHEST * self.random.random() * self.random.random())
        later = (each for each in sequence[at + 1 :] if rank in self.elements.ranks[each])
        other = next(islice(later, apart - 1, None), None)
        if other is None:
            return sequence
        element, step = sequence[at], self.problem.microbatches
        left = step - 1 - max(element % step, other % step)
        more = 0 if self.random.random() < 0.7 else self.random.randint(0, left)
        for by in range(more + 1):  # the same for the microbatches that follow
            if element + by in sequence and other + by in sequence:  # weight gradients of whole backwards are not
                sequence = _exchanged(self.elements, sequence, element + by, other + by, rank)
        return sequence

    def _pair(self, old: Sequenced) -> _Neighbour | None:
        """Split a pair, or put a forward directly behind a backward of its rank, as a pair."""
        problem, candidate = self.problem, old.candidate
        rank = self.random.randrange(problem.ranks)
        row = old.solution.orders[rank]
        places = [at for at, op in enumerate(row) if op // problem.count == 1]
        if not places:
            return None
        at = self.random.choice(places)
        backward, beside = row[at], bytearray(candidate.beside or problem.count)
        beside[backward - problem.count] ^= 1
        sequence = old.sequence
        if beside[backward - problem.count]:
            near = [to for to in range(max(0, at - 4), min(len(row), at + 5)) if row[to] < problem.count]
            if not near:
                return None
            to = self.random.choice(near)
            if to != at + 1:
                sequence = _moved(self.elements, sequence, sequence.index(row[to]), rank, at - to + (to > at))
        return replace(candidate, beside=beside), sequence

    def _piece(self, sequence: list[int]) -> list[int]:
        """Shift successive elements of one microbatch, or of successive microbatches, by one distance."""
        problem, random = self.problem, self.random
        by = len(sequence) / problem.microbatches * random.random() * random.random()
        first = random.randrange(problem.microbatches)
        last = first + 1 if random.random() < 0.7 else random.randint(first + 1, problem.microbatches)
        path = self._path()
        start = random.randrange(len(path))
        end = random.randint(start + 1, len(path))
        piece = {each * problem.microbatches + m for each in path[start:end] for m in range(first, last)}
        late = random.random() < 0.5
        shift = by if late else -by
        keys = {each: at + shift * (each in piece) for at, each in enumerate(sequence)}
        return self.elements.sorted(sequence, keys.__getitem__, late=late)

    def _path(self) -> Sequence[int]:
        """The kinds and stages that a microbatch passes, messages and weight gradients included."""
        stages = self.problem.stages
        forwards = [kind * stages + stage for stage in range(stages) for kind in (3, 0)]
        return forwards + [kind * stages + stage for stage in reversed(range(stages)) for kind in (4, 1, 2)]


def _exchanged(elements: Elements, sequence: list[int], first: int, second: int, rank: int) -> list[int]:
    """The sequence with two elements of a rank's row exchanged, if they are near each other."""
    one, other = sorted((sequence.index(first), sequence.index(second)))
    apart = sum(rank in elements.ranks[each] for each in sequence[one + 1 : other + 1])
    if apart > _FARTHEST:
        return sequence
    moved = _moved(elements, sequence, one, rank, apart)
    return _moved(elements, moved, moved.index(sequence[other]), rank, 1 - apart)


def _moved(elements: Elements, sequence: list[int], at: int, rank: int, by: int) -> list[int]:
    """The sequence with an element moved over `by` of the rank's elements (back if negative), with its dependent elements."""
    if by < 0:
        return _carried(sequence[::-1], len(sequence) - 1 - at, elements.after, elements.ranks, rank, -by)[::-1]
    return _carried(sequence, at, elements.before, elements.ranks, rank, by)


def _carried(
    sequence: list[int], at: int, before: Sequence[Sequence[int]], ranks: Sequence[Sequence[int]], rank: int, left: int
) -> list[int]:
    moved, staying, to = [sequence[at]], list[int](), at
    carried = set(moved)
    while left and to + 1 < len(sequence):
        to += 1
        element = sequence[to]
        if carried.isdisjoint(before[element]):
            staying.append(element)
            left -= rank in ranks[element]
        else:
            moved.append(element)
            carried.add(element)
    return [*sequence[:at], *staying, *moved, *sequence[to + 1 :]]
