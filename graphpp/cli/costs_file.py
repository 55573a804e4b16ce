"""Costs in a file: the fields of `graphpp.Costs` and `graphpp.StageCosts` as JSON.

Contract: the document has the fields of `Costs`, of which only `stages` may not be left out; `json.dumps(asdict(costs))` writes
one. Raises `ScheduleError` that names file and field: for an unknown field, one that stands twice, a value of another type, and
numbers that `Costs` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphpp.errors import GraphPPError, ScheduleError
from graphpp.from_json import document, read
from graphpp.schedules.table.costs import Costs


def read_costs(path: Path) -> Costs:
    """The costs in a file of JSON."""
    try:
        given = document(path, str(path))
        found: Costs = read(Costs, given, str(path))
    except GraphPPError as fault:
        raise ScheduleError(str(fault)) from fault
    if not found.stages or any(number < 0 for number in _numbers(given)):
        raise ScheduleError(f"{path}: take the costs of one stage or more, and no negative number")
    return found


def _numbers(given: Any) -> Iterator[float]:
    """All numbers of a JSON document."""
    if isinstance(given, list | dict):
        for each in given.values() if isinstance(given, dict) else given:
            yield from _numbers(each)
    elif isinstance(given, int | float):
        yield given
