"""What `make test` leaves to `make test-all`: cases marked `exhaustive`, and more random examples.

`@pytest.mark.first_cases(n)` above a test with parameters leaves the cases after its first n to `make test-all`.

`GRAPHPP_FUZZ` is the number of random programs of tests/fuzz; below 100, other random tests take that percentage of their
examples.
"""

import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

PROGRAMS = int(os.environ.get("GRAPHPP_FUZZ", "8"))


def further(*cases: Any) -> list[Any]:
    """Cases for `parametrize` of a kind of which `make test` runs others; a tuple is one case of several arguments."""
    each = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*values, marks=pytest.mark.exhaustive) for values in each]


def cases(names: Iterable[Any], *leading: Any) -> list[Any]:
    """The leading cases, and the others of `names` as further cases."""
    return [*leading, *further(*(name for name in names if name not in leading))]


def examples(count: int) -> int:
    """How many of `count` random examples a test takes."""
    return max(1, count * min(PROGRAMS, 100) // 100)


def mark_further_cases(items: Iterable[pytest.Item]) -> None:
    """Mark the cases of a test after its `first_cases(n)` first ones as exhaustive; cases marked already do not count."""
    seen: Counter[str] = Counter()
    for item in items:
        if (marker := item.get_closest_marker("first_cases")) and not item.get_closest_marker("exhaustive"):
            test = item.nodeid.partition("[")[0]
            seen[test] += 1
            if seen[test] > marker.args[0]:
                item.add_marker(pytest.mark.exhaustive)
