"""Read a JSON file with the fields of `graphpp.Costs`, as `json.dumps(asdict(costs))` writes it.

Raises `ScheduleError` with file and field for unknown, repeated or mistyped fields, and for numbers that `Costs` refuses.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from graphpp.errors import GraphPPError, ScheduleError
from graphpp.from_json import document, read
from graphpp.schedules.table.costs import Costs


def read_costs(path: Path) -> Costs:
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
