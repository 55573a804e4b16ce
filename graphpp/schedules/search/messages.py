"""Sends and receives that occupy ranks, as operations of the search (`Costs.blocking`).

Contract
    With N forwards, `with_messages` numbers the SEND of the value that operation r reads 3 N + r, and its RECV 5 N + r. Each
    occupies its rank as in the simulator: a SEND from its start for the message's time, a RECV until the message has ended.
"""

from __future__ import annotations

from dataclasses import replace

from graphpp.schedules.search.problem import Problem
from graphpp.schedules.table.costs import Costs


def with_messages(estimate: Problem, costs: Costs) -> Problem:
    """The problem whose messages are operations of their own, so that the times of its rows are the simulator's."""
    silent = replace(costs, blocking=False, sends_forward=(), sends_backward=())
    problem = Problem.of(silent, dict(enumerate(estimate.home)), estimate.microbatches, estimate.cap)
    count = problem.count
    directions = (costs.sends_forward, costs.sends_backward)
    up, down = ([costs.message(sends, at) for at in range(problem.stages - 1)] for sends in directions)
    seconds = [0.0, *up, *down, 0.0]  # of the message that a stage's forward reads, then of the one that its backward reads
    reads, busy = [*problem.reads, *[-1] * (4 * count)], [0.0] * problem.ranks
    took, lag = [*problem.took, *[0.0] * (4 * count)], [*problem.lag, *[0.0] * (4 * count)]
    for reader in range(2 * count):
        maker = problem.reads[reader]
        if maker >= 0 and problem.rank_of(maker) != problem.rank_of(reader):
            send, receive = 3 * count + reader, 5 * count + reader
            reads[reader], reads[receive], reads[send] = receive, send, maker
            took[send] = took[receive] = seconds[reader // problem.microbatches] / problem.unit + problem.overhead
            lag[receive] = -took[send]
            busy[problem.rank_of(maker)] += took[send]
            busy[problem.rank_of(reader)] += took[send]
    return replace(problem, took=tuple(took), lag=tuple(lag), reads=tuple(reads), messages=tuple(busy), blocking=True)
