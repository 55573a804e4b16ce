"""Fill the waits of an order: operations whose inputs have arrived overtake the operation for which their rank would wait.

- The ranks run in the order of time, as in a list scheduler. If the input of a rank's next operation has not arrived, the rank
  takes the first later operation whose input has arrived and which overtakes no operation of its own stage and kind. The memory
  must suffice for that operation together with all operations that it overtakes, so an order that fits still fits.
- If pairs are allowed, they are chosen anew: an operation is paired with the first later one of the other kind whose input has
  arrived, or arrives so soon that the pair saves more time than the rank waits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from graphpp.schedules.search.candidate import Candidate, operation_costs, pair_time
from graphpp.schedules.search.problem import Problem


def fill_waits(problem: Problem, candidate: Candidate, window: int) -> Candidate:
    """The candidate with its waits filled, looking at `window` operations per rank; the result can run in the same memory."""
    ranks = _Ranks(problem, candidate, window)
    while ranks.events:
        now, rank = heapq.heappop(ranks.events)
        if now >= ranks.free[rank] - 1e-12 and ranks.at[rank] < len(ranks.orders[rank]):
            ranks.act(rank, now)
    return Candidate(ranks.orders, candidate.whole, candidate.patience, ranks.beside)


class _Ranks:
    """All ranks. `live`: the bytes alive on each; `base`: the bytes if all weight gradients that can run had run."""

    def __init__(self, problem: Problem, candidate: Candidate, window: int) -> None:
        self.problem, self.candidate, self.window = problem, candidate, window
        self.took, self.more, self.change, self.leaves, _ = operation_costs(problem, bytes(candidate.whole))
        self.reader = {problem.reads[op]: op for op in range(2 * problem.count)}
        self.orders = [list(order) for order in candidate.orders]
        self.ends = [-1.0] * (2 * problem.count) + [0.0]
        self.at, self.free = [0] * problem.ranks, [0.0] * problem.ranks
        self.base, self.live = [0] * problem.ranks, [0] * problem.ranks
        self.weights: list[list[int]] = [[] for _ in range(problem.ranks)]
        self.beside = bytearray(problem.count if problem.pairs else 0)
        self.events = [(0.0, rank) for rank in range(problem.ranks)]

    def act(self, rank: int, now: float) -> None:
        """Start an operation of the rank now, if one can run, and schedule the next event of the rank."""
        problem, order, at = self.problem, self.orders[rank], self.at[rank]
        there = self._there(order[at])
        place = at if 0 <= there <= now + 1e-9 else self._ahead(rank, now)
        if place is None:
            first = self.weights[rank][0] if self.weights[rank] else None
            # unknown `there`: the maker of the input has not started, so its whole time is still to come
            until = there if there >= 0 else now + self.took[problem.reads[order[at]]]
            if first is not None and until - now >= self.took[first] - 1e-9:
                self._weight(rank, now)
            elif there >= 0:
                heapq.heappush(self.events, (there, rank))
        elif self._fits(rank, order[place]):
            order.insert(at, order.pop(place))
            mate = self._mate(rank, now) if problem.pairs else None
            if mate is None:
                self._run(rank, order[at : at + 1], now + self.took[order[at]])
            else:
                order.insert(at + 1, order.pop(mate))
                order[at : at + 2] = backward, forward = sorted(order[at : at + 2], reverse=True)
                self.beside[backward - problem.count] = 1
                start = max(now, self._there(backward), self._there(forward))
                self._run(rank, order[at : at + 2], start + pair_time(problem, self.candidate, backward, forward))
        else:
            self._weight(rank, now)

    def _there(self, op: int) -> float:
        """The time at which the input of an operation is on its rank; negative if not yet known."""
        end = self.ends[self.problem.reads[op]]
        return end if end < 0 else end + self.problem.lag[op] if self.problem.reads[op] >= 0 else 0.0

    def _ahead(self, rank: int, now: float) -> int | None:
        """The position in the order of the operation that may overtake the others; None if none may."""
        problem, count = self.problem, self.problem.count
        most = base = self.base[rank]
        overtaken: set[int] = set()
        for place, op, size in self._next(rank):
            stream = op // problem.microbatches  # number of a kind and stage, whose operations keep their order
            fits = op >= count or most + self.more[op] <= problem.cap[rank]
            if overtaken and stream not in overtaken and fits and 0 <= self._there(op) <= now + 1e-9:
                return place
            overtaken.add(stream)
            base += size
            most = max(most, base)
        return None

    def _mate(self, rank: int, now: float) -> int | None:
        """The position of the operation that runs together with the rank's next one; None if none does."""
        problem, count, at = self.problem, self.problem.count, self.at[rank]
        first = self.orders[rank][at]
        most = base = self.base[rank]
        overtaken: set[int] = set()
        for place, op, size in self._next(rank):
            if place > at and (op < count) != (first < count):
                if op // problem.microbatches in overtaken or self._there(op) < 0:
                    return None
                forward, backward = min(first, op), max(first, op)
                saving = self.took[first] + self.took[op] - pair_time(problem, self.candidate, backward, forward)
                alive = max(self.live[rank], most if op < count else 0)
                fits = alive + self.more[forward] + self.more[backward] <= problem.cap[rank]
                return place if fits and self._there(op) - now < saving - 1e-9 else None
            overtaken.add(op // problem.microbatches)
            base += size
            most = max(most, base)
        return None

    def _next(self, rank: int) -> Iterator[tuple[int, int, int]]:
        order, at = self.orders[rank], self.at[rank]
        for place in range(at, min(len(order), at + self.window)):
            yield place, order[place], self._saved(order[place])

    def _fits(self, rank: int, op: int) -> bool:
        """Whether the operation fits into memory now, or no pending weight gradient is left that could free memory."""
        return self.live[rank] + self.more[op] <= self.problem.cap[rank] or not self.weights[rank]

    def _weight(self, rank: int, now: float) -> None:
        weight = self.weights[rank].pop(0)
        self.live[rank] += self.change[weight]
        self.free[rank] = now + self.took[weight]
        heapq.heappush(self.events, (self.free[rank], rank))

    def _run(self, rank: int, ops: Sequence[int], end: float) -> None:
        self.free[rank] = end
        for op in ops:
            self.ends[op] = end
            self.at[rank] += 1
            self.base[rank] += self._saved(op)
            self.live[rank] += self.change[op]
            if self.leaves[op]:
                self.weights[rank].append(op + self.problem.count)
        heapq.heappush(self.events, (end, rank))
        for reader in (self.reader[op] for op in ops if op in self.reader):
            other = self.problem.rank_of(reader)
            heapq.heappush(self.events, (max(end + self.problem.lag[reader], self.free[other]), other))

    def _saved(self, op: int) -> int:
        """The change of the saved bytes by a forward, or by a backward whose weight gradient has run."""
        saved = self.problem.saved[op % self.problem.count // self.problem.microbatches]
        return saved if op < self.problem.count else -saved
